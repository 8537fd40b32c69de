"""Kernels of our own: the same as torch's operations, for both kinds of numbers and any number of cores."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from regard.core import Context
from regard.native import build, decode
from regard.native.matmul import pack_matrix
from regard.parts.positions.rotary import Rotary

KNOWN = build.load_kernels()
pytestmark = pytest.mark.skipif(KNOWN is None, reason="there is no compiler")
CLOSE = {torch.float32: 2e-5, torch.float64: 1e-12}
DTYPES = list(CLOSE)


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE[found.dtype] * max(1.0, float(wanted.abs().max())))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 24, 25, 61])
@pytest.mark.parametrize(("wide", "out"), [(5, 3), (64, 37), (200, 301)])
@pytest.mark.parametrize("bias", [True, False])
def test_products(threads, dtype, rows, wide, out, bias, known):
    x, weight = torch.randn(rows, wide, dtype=dtype), torch.randn(out, wide, dtype=dtype)
    add = torch.randn(out, dtype=dtype) if bias else None
    wanted = F.linear(x, weight, add)
    near(decode.apply(known, decode.linear_params(weight, add), x), wanted)
    near(decode.apply(known, decode.linear_params(weight, add, pack_matrix(known, weight.T).numbers), x), wanted)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("activation_name", "torchs"), [
    ("identity", lambda x: x), ("relu", F.relu), ("gelu", F.gelu), ("silu", F.silu),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
])  # fmt: skip
def test_feed_forward(threads, dtype, rows, activation_name, torchs, known):
    x, into, out = (torch.randn(*size, dtype=dtype) for size in ((rows, 20), (45, 20), (20, 45)))
    x[0] *= 9  # far from 0, too
    wanted = F.linear(torchs(F.linear(x, into)), out)
    packed = [None, None] if rows < 25 else [pack_matrix(known, into.T).numbers, pack_matrix(known, out.T).numbers]
    maps = decode.linear_params(into, None, packed[0]), decode.linear_params(out, None, packed[1])
    near(decode.Program([decode.plan_mlp(*maps, activation_name, rows)]).run(known, x), wanted)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 16, 32, 48, 64, 128, 24])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("added", ["none", "mask", "bias", "head bias"])
def test_attention(threads, dtype, dim, heads, groups, added, known):
    batch, queries, keys = 3, 2, 19
    q = torch.randn(batch, queries, heads, dim, dtype=dtype).transpose(1, 2) * dim**-0.5
    k, v = (torch.randn(batch, keys + 1, groups, dim, dtype=dtype)[:, :keys].transpose(1, 2) for _ in range(2))
    extra = {
        "none": None,
        "mask": torch.rand(batch, 1, queries, keys) > 0.4,
        "bias": torch.randn(1, 1, 1, keys, dtype=dtype),
        "head bias": torch.randn(batch, heads, queries, keys, dtype=dtype).masked_fill(
            torch.rand(batch, 1, 1, keys) > 0.5, -torch.inf
        ),
    }[added]
    if extra is not None:
        extra[..., 0] = True if added == "mask" else 0.5
    wanted = F.scaled_dot_product_attention(q, k, v, extra, scale=1.0, enable_gqa=True)
    near(decode.attend(known, q, k, v, extra).transpose(1, 2), wanted)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_other_rows_hold(threads, dtype, known):
    q, k, v = torch.randn(4, 3, 1, 16, dtype=dtype), *(torch.randn(6, 9, 3, 16, dtype=dtype) for _ in range(2))
    held = torch.randint(6, (4, 12))
    own = [t[held[:, :9], torch.arange(9)].transpose(1, 2) for t in (k, v)]
    wanted = F.scaled_dot_product_attention(q, *own, scale=1.0)
    near(decode.attend(known, q, k.transpose(1, 2), v.transpose(1, 2), None, held).transpose(1, 2), wanted)


def test_nothing_to_see_gives_nothing(known):
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 5, 16)
    k[:, :, 3] = torch.nan  # nobody looks
    hidden = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    assert torch.equal(decode.attend(known, q, k, k, hidden), torch.zeros(1, 1, 2, 16))
    hidden[..., 1] = True
    near(decode.attend(known, q, k, k, hidden).transpose(1, 2), k[:, :, 1:2])


def test_what_is_not_a_number_stays_none(known):
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 5, 16)
    k[:, 0, 3] = torch.nan
    found = decode.attend(known, q, k, k, None)
    assert bool(found[:, :, 0].isnan().all())
    assert not bool(found[:, :, 1].isnan().any())


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 11, 12, 29])
@pytest.mark.parametrize(("words", "many"), [(7, 7), (32, 3), (100, 10), (1000, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_likeliest_words(dtype, rows, words, many, bias, known):
    x, table = torch.randn(rows, 20, dtype=dtype), torch.randn(words, 20, dtype=dtype)
    add = 3 * torch.randn(words, dtype=dtype) if bias else None
    logs, at = decode.top_k(known, x, pack_matrix(known, table.T).numbers, add, words, many)
    every = F.linear(x, table, add).log_softmax(-1)
    wanted = every.topk(many, -1)
    near(logs, wanted.values)
    near(every.gather(1, at), wanted.values)  # two that are alike to the last bit may come in either order
    assert all(len(set(row)) == many for row in at.tolist())
    assert dtype == torch.float32 or torch.equal(at, wanted.indices)


def test_scores_far_apart(known):
    """Neither overflow nor loss: what is likely is likely wherever the scores lie."""
    x, table = torch.tensor([[1.0], [-1.0]]), torch.tensor([[500.0], [-400.0], [499.0], [0.0]])
    logs, at = decode.top_k(known, x, pack_matrix(known, table.T).numbers, None, 4, 2)
    assert at.tolist() == [[0, 2], [1, 3]]
    near(logs, torch.tensor([[-math.log1p(math.exp(-1)), -1 - math.log1p(math.exp(-1))], [0.0, -400.0]]))


def test_scores_that_are_no_numbers_are_found_out(known):
    table = torch.randn(50, 4)
    logs, _ = decode.top_k(known, torch.full((2, 4), torch.nan), pack_matrix(known, table.T).numbers, None, 50, 3)
    assert bool(logs.isnan().all())


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centres", [True, False])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("wide", [13, 32, 45])
def test_norms_around_branches(threads, dtype, centres, weight, bias, wide, known):
    """x <- after(x + f(before(x))), twice, and one at the end."""
    rows, hidden = 5, 29
    x, into, out = (torch.randn(*size, dtype=dtype) for size in ((rows, wide), (hidden, wide), (wide, hidden)))
    gains = [(torch.randn(wide, dtype=dtype) if weight else None) for _ in range(3)]
    shifts = [(torch.randn(wide, dtype=dtype) if bias else None) for _ in range(3)]

    def norm(x, i):
        if centres:
            return F.layer_norm(x, (wide,), gains[i], shifts[i], 1e-3)
        y = F.rms_norm(x, (wide,), gains[i], 1e-3)
        return y if shifts[i] is None else y + shifts[i]

    made = [decode.norm_params(x, gain, shift, 1e-3, centres) for gain, shift in zip(gains, shifts, strict=True)]
    maps = decode.linear_params(into, None), decode.linear_params(out, None)

    def f(x):
        return F.linear(F.relu(F.linear(x, into)), out)

    wanted = x + f(norm(x, 0))
    wanted = norm(norm(wanted + f(wanted), 1), 2)
    branches = [decode.plan_mlp(*maps, "relu", rows) for _ in range(2)]
    near(decode.Program(branches, [(made[0], None), (None, made[1])], made[2]).run(known, x), wanted)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_hidden_changes_from_step_to_step(threads, dtype, known):
    """A mask, a bias, neither, other rows' keys: what is made for one step is changed for the next."""
    rows, heads, dim, slots = 4, 3, 16, 9
    x, k, v = torch.randn(rows, 20, dtype=dtype), *(torch.randn(rows, slots, heads, dim, dtype=dtype) for _ in range(2))
    weights = [torch.randn(heads * dim, 20, dtype=dtype) / 4, torch.randn(20, heads * dim, dtype=dtype)]
    query, last = (decode.linear_params(weight, None) for weight in weights)
    hidden, bias = torch.rand(rows, 1, 1, slots) > 0.4, torch.randn(1, heads, 1, slots, dtype=dtype)
    hidden[..., 0] = True
    held = torch.randint(rows, (rows, slots))
    made = None
    for added, rows_of, keys in [
        (hidden, None, 9),
        (None, None, 5),
        (bias, held, 9),
        (None, held, 7),
        (hidden, None, 9),
    ]:
        added = None if added is None else added[..., :keys]
        if made is None:
            made = decode.plan_attention((query, None, None, last), rows, k, v, 0, 0.3, added, rows_of, keys)
        else:
            decode.update_attention(made, 0, added, rows_of, keys)
        q = F.linear(x, weights[0]).view(rows, heads, 1, dim)
        own = [t if rows_of is None else t[held, torch.arange(slots)] for t in (k, v)]
        own = [t[:, :keys].transpose(1, 2) for t in own]
        wanted = F.scaled_dot_product_attention(q, *own, added, scale=0.3)
        near(decode.Program([made]).run(known, x), F.linear(wanted.flatten(1), weights[1]))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("places", [[7, 7, 7, 7], [3, 0, 8, 5]])
def test_queries_and_keys_are_turned(threads, dtype, layout, places, known):
    """Rows at one place or at several, a part of the channels, fewer key heads than heads."""
    rows, groups, dim, slot = 4, 2, 16, 3
    x, k, v = torch.randn(rows, 20, dtype=dtype), *(torch.randn(rows, 5, groups, dim, dtype=dtype) for _ in range(2))
    weights = [torch.randn(out, wide, dtype=dtype) / 4 for out, wide in ((96, 20), (32, 20), (32, 20), (20, 96))]
    turn = Rotary(dim, layout, fraction=0.5)
    at = torch.tensor(places)[:, None]
    new, wanted_k, wanted_v = (F.linear(x, weight).view(rows, -1, 1, dim) for weight in weights[:3])
    wanted_k = turn.key(wanted_k, at)
    rotary_tables = turn.rotary_tables(Context(at), dtype)
    assert len(rotary_tables.cos) == len(set(places))
    maps = [decode.linear_params(weight, None) for weight in weights]
    found = decode.Program([decode.plan_attention(maps, rows, k, v, slot, 0.3, None, None, 5, 1, rotary_tables)]).run(
        known, x
    )
    near(k[:, slot], wanted_k[:, :, 0])
    near(v[:, slot], wanted_v[:, :, 0])
    sees = F.scaled_dot_product_attention(
        turn.query(new, at), k.transpose(1, 2), v.transpose(1, 2), scale=0.3, enable_gqa=True
    )
    near(found, F.linear(sees.flatten(1), weights[3]))


CODE = "from regard.native.build import load_kernels; load_kernels(); print(load_kernels() is None)"


def told(**more):
    done = subprocess.run([sys.executable, "-c", CODE], env=more, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_without_a_compiler_there_are_none(tmp_path):
    assert told(PATH=str(tmp_path), HOME=str(tmp_path)) == ("True", "")


def test_a_compiler_that_fails_is_told_once(tmp_path):
    bad = tmp_path / "c++"
    bad.write_text("#!/bin/sh\necho 'kernels.cpp:3: error: no such instruction' >&2\nexit 1\n")
    bad.chmod(0o755)
    out, warned = told(PATH=str(tmp_path), HOME=str(tmp_path))
    assert out == "True"
    assert f"{bad} could not compile them: kernels.cpp:3: error: no such instruction" in warned
    assert warned.count("regard goes on") == 1


def test_they_can_be_left_out(tmp_path):
    assert told(PATH=os.environ["PATH"], HOME=str(tmp_path), REGARD_NATIVE="0") == ("True", "")


def test_a_home_that_cannot_be_written_to_will_do(hasty, tmp_path):
    (tmp_path / "file").write_text("")
    assert told(PATH=f"{hasty}:{os.environ['PATH']}", XDG_CACHE_HOME=str(tmp_path / "file")) == ("False", "")


def test_what_is_compiled_stays(hasty, tmp_path):
    for _ in range(2):
        assert told(PATH=f"{hasty}:{os.environ['PATH']}", XDG_CACHE_HOME=str(tmp_path)) == ("False", "")
        assert len(list((tmp_path / "regard").iterdir())) == 2  # the library and its checksum


def test_a_compiler_that_hangs_is_given_up_once(tmp_path):
    """It is not asked again with other flags, and what it has started ends with it."""
    slow, log = tmp_path / "c++", tmp_path / "log"
    slow.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >> {log}\nwait\n")
    slow.chmod(0o755)
    code = f"from regard.native import build; build.COMPILE_TIMEOUT = 4\n{CODE.replace('; ', chr(10))}"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert f"{slow} could not compile them: it did not end within 4 seconds" in done.stderr
    assert done.stderr.count("regard goes on") == 1
    started = log.read_text().split()
    assert 1 <= len(started) <= len(build.SOURCES)
    assert not any(runs(pid) for pid in started)


def runs(pid):
    """A zombie does not."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "(zombie)" not in status.read_text()


def test_no_folder_to_write_to_at_all(tmp_path):
    """Neither the cache nor a temporary folder: torch does everything, and it is told once."""
    (tmp_path / "file").write_text("")
    code = f"import tempfile; tempfile.tempdir = {str(tmp_path / 'file')!r}\n{CODE.replace('; ', chr(10))}"
    env = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert done.stderr.count("regard goes on with torch's slower operations") == 1
    assert "Not a directory" in done.stderr
