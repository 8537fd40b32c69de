"""Whatever a user gets wrong is told in one sentence that names the file, the entry and the nearest right word."""

import pytest
import torch

import regard
from regard import UserError
from regard import schema as parts
from regard.cli import main
from regard.files import recipe

MINE = """
title = "Mine"
vocab = 61

[model]
kind = "decoder"
width = 24
heads = 3
depth = 2
embed = { part = "tokens" }

[[model.layer]]
mixer = { part = "attention", pattern = "causal" }
feedforward = { part = "mlp", hidden = 48 }
wiring = "pre"

[size.tiny.model]
width = 12
"""

OVERRIDES = {
    "unknown mixer": ('model.layer.0.mixer.part="atention"', "model.layer[0].mixer: unknown mixer", "'attention'?"),
    "unknown norm": ('model.layer.0.wiring.norm="lyer"', "model.layer[0].wiring.norm: unknown norm", "'layer'?"),
    "unknown position": ('model.embed.position="learnt"', "model.embed.position: unknown position", "'learned'?"),
    "unknown head": ('model.head="vocabulry"', "model.head: unknown head", "'vocabulary'?"),
    "part that is no word": ("model.layer.0.mixer.part=5", "model.layer[0].mixer: unknown mixer '5'"),
    "no part": ("model.layer.0.mixer={pattern='causal'}", "model.layer[0].mixer: which mixer?", "part = ..."),
    "unknown key": ("model.layer.0.mixer.kv_head=1", "model.layer[0].mixer: attention has no", "'kv_heads'?"),
    "unknown key of the model": ("model.widht=3", "model has no 'widht'", "'model.width'?"),
    "unknown key of nothing": ("model.embed.zzz=3", "model.embed: tokens has no 'zzz'"),
    "unknown kind": ('model.kind="decodr"', "model: unknown kind 'decodr'", "'decoder'?"),
    "unknown tie": ('model.tie="targt"', "model: unknown tie 'targt'", "'target'?"),
    "unknown share": ('model.share="layer"', "model: ", "'layers'", "not 'layer'"),
    "unknown pattern": ('model.layer.0.mixer.pattern="causl"', "model.layer[0].mixer.pattern", "'causal'?"),
    "unknown pattern inside": ('model.layer.0.mixer.pattern="causal & windw(3)"', "mixer.pattern", "'window'?"),
    "unreadable pattern": ('model.layer.0.mixer.pattern="causal &"', "mixer.pattern", "cannot be read"),
    "code as pattern": ("model.layer.0.mixer.pattern=\"__import__('os')\"", "mixer.pattern", "unknown pattern"),
    "pattern without a number": ('model.layer.0.mixer.pattern="causal & window()"', "window needs 'size'"),
    "pattern of a word": ("model.layer.0.mixer.pattern=\"causal & window('x')\"", "window.size", "a whole number"),
    "pattern that is a number": ("model.layer.0.mixer.pattern=3", "mixer.pattern: a pattern is a name", "not 3"),
    "blind pattern": ('model.layer.0.mixer.pattern="causal & ~window(1)"', "layer[0].mixer", "position 0", "nothing"),
    "heads do not divide": ("model.heads=5", "model.layer[0].mixer", "width 24", "5 heads"),
    "kv_heads do not divide": ("model.layer.0.mixer.kv_heads=2", "model.layer[0].mixer", "3 heads", "2 kv_heads"),
    "looks ahead": ('model.layer.0.mixer.pattern="everything"', "model.layer[0].mixer", "'everything'", "looks ahead"),
    "width is a word": ('model.width="wide"', "model.width must be a whole number, not 'wide'"),
    "depth is a fraction": ("model.depth=2.5", "model.depth must be a whole number, not 2.5"),
    "heads are true": ("model.heads=true", "model.heads must be a whole number, not True"),
    "no heads": ("model.heads=0", "model.heads must be at least 1, not 0"),
    "no depth": ("model.depth=0", "model.depth must be at least 1, not 0"),
    "negative hidden": ("model.layer.0.feedforward.hidden=-4", "layer[0].feedforward: mlp.hidden must be at least 1"),
    "dropout is a word": ('model.dropout="much"', "model.dropout must be a number, not 'much'"),
    "dropout above one": ("model.dropout=1.5", "model.dropout must be at least 0 and below 1"),
    "dropout is no number": ("model.dropout=nan", "model.dropout must be at least 0 and below 1"),
    "layer is a number": ("model.layer=5", "model.layer must be a list or a table, not 5"),
    "layer is empty": ("model.layer=[]", "model: a stack needs at least one layer"),
    "a layer is a word": ('model.layer.0="attention"', "model.layer[0]: a layer is a table", "not 'attention'"),
    "a layer without branches": ("model.layer.0={wiring='pre'}", "model.layer[0]: a layer needs at least one branch"),
    "a mixer is a number": ("model.layer.0.mixer=3", "model.layer[0].mixer: a mixer is a name or a table", "not 3"),
    "a norm is a list": ("model.norm=[1]", "model.norm: a norm is a name or a table", "not [1]"),
    "vocab is a word": ('vocab="big"', "vocab must be a whole number", "not 'big'"),
    "vocab of three": ("vocab=[1,2,3]", "vocab must be a whole number", "not [1, 2, 3]"),
    "vocab of none": ("vocab=0", "vocab must be a whole number from 1 on", "not 0"),
    "another width inside": ("model.layer.0.mixer.width=48", "layer[0].mixer", "attention.width is 24 here", "48"),
    "what the assembly gives": ("model.layer.0.mixer.place=3", "layer[0].mixer: attention has no 'place'"),
    "branches of a wiring": ("model.layer.0.wiring.branches=3", "layer[0].wiring: pre has no 'branches'"),
    "sinusoidal in attention": ('model.layer.0.mixer.position="sinusoidal"', "layer[0].mixer", "vectors", "embed"),
    "rotary in the embed": ('model.embed.position="rotary"', "model.embed", "'rotary'", "acts in attention"),
    "a position that nobody takes": ('model.position="rotary"', "model.position", "'shared'"),
    "shared without one": ('model.layer.0.mixer.position="lost"', "mixer.position: unknown position 'lost'"),
    "an encoder in a decoder": ("model.encoder={depth=2}", "model.encoder: a model of kind 'decoder' has no encoder"),
    "tied without a pair": ('model.tie="all"', "model: tie = 'all' needs an encoder-decoder"),
    "override of nothing": ("modle.width=3", "override 'modle.width=3': no entry 'modle'", "'model'?"),
    "override of a size": ("size.tiny.model.width=3", "override 'size.tiny.model.width=3': no entry 'size'"),
    "override without a value": ("model.width", "override 'model.width' should look like model.width=256"),
    "override with a hole": ("model..width=3", "override 'model..width=3' should look like"),
    "override beyond the list": ("model.layer.1.mixer='gru'", "the list has 1 entries", "'1' is none of them"),
    "override of a listed word": ("model.layer.mixer='gru'", "the list has 1 entries", "'mixer' is none of them"),
    "override inside a number": ("model.width.x=3", "there is no 'x' inside 24"),
    "unknown entry": ("colour='red'", "no entry 'colour'"),
}  # fmt: skip


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A sound recipe in a folder of one's own, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "user_folders", [])
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def refused(capsys, arguments: list[str]) -> str:
    """What the command line says, after checking that it is one line on stderr, with exit code 2."""
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("regard: ")
    assert told.count("\n") == 1
    assert "Traceback" not in told
    return told


def test_the_sound_recipe_is_sound(mine):
    assert regard.build("mine.toml").width == 24
    assert regard.build("mine.toml", size="tiny").width == 12


@pytest.mark.parametrize("case", OVERRIDES)
def test_overrides(mine, capsys, case):
    text, *words = OVERRIDES[case]
    with pytest.raises(UserError) as error:
        regard.build("mine.toml", overrides=[text])
    assert str(error.value).startswith("mine.toml: ")
    assert "\n" not in str(error.value)
    told = refused(capsys, ["show", "mine.toml", "--set", text])
    for word in words:
        assert word in str(error.value)
        assert word in told


FILES = {
    "not TOML": ("[model\nkind = 3", "mine.toml: is not TOML", "line 1"),
    "not text": (b"\xff\xfe\x00", "mine.toml cannot be read: 'utf-8' codec"),
    "empty": ("", "mine.toml: a recipe needs a [model]"),
    "a model that is a number": ("model = 3", "mine.toml: a recipe needs a [model]"),
    "unknown section": ("[modle]\nwidth = 3\n" + MINE, "unknown entry 'modle'", "'model'?"),
    "size that is a number": ("size = 3\n[model]\nkind = 'decoder'", "mine.toml: size: holds tables"),
    "no kind": ("vocab = 9\n[model]\nwidth = 3", "mine.toml: model needs 'kind', a word"),
    "no width": ("vocab = 9\n[model]\nkind = 'decoder'", "mine.toml: model needs 'width', a whole number"),
    "no layer": ("vocab = 9\n[model]\nkind = 'decoder'\nwidth = 3", "model: needs at least one [[model.layer]]"),
    "a size of another list": (MINE.replace("width = 12", "layer.7.mixer.heads = 2"), "size.tiny", "'7' is none"),
    "a size of another kind": (MINE.replace("width = 12", "layer.0 = 2"), "size.tiny", "'layer.0' is not a table"),
    "one layer for two sides": (MINE.replace('"decoder"', '"encoder-decoder"'), "model.layer: ", "encoder.layer"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files(mine, capsys, case):
    text, *words = FILES[case]
    mine.write_bytes(text if isinstance(text, bytes) else text.encode())
    size = ["--size", "tiny"] if case.startswith("a size") else []
    for command in ("show", "verify"):
        told = refused(capsys, [command, "mine.toml", *size])
        assert all(word in told for word in words), told


def test_a_side_of_two_is_named(mine):
    """The path says which stack, and which of several kinds of layer."""
    sides = "[[model.encoder.layer]]\nmixer = {part='attention', pattern='everything'}\n"
    for pattern, index in (("causal", 1), ("everything", 0)):
        layers = f"[[model.decoder.layer]]\nmixer = {{part='attention', pattern='{pattern}'}}\n"
        layers += "[[model.decoder.layer]]\nmixer = {part='attention', pattern='everything'}\n"
        head = "vocab = 9\n[model]\nkind = 'encoder-decoder'\nwidth = 8\ndepth = 3\n"
        mine.write_text(head + sides + layers)
        with pytest.raises(UserError, match=rf"mine.toml: model.decoder.layer\[{index}\].mixer: .*looks ahead"):
            regard.build(mine)


def test_names(mine, capsys):
    assert "did you mean 'transformer'?" in refused(capsys, ["show", "transfomer"])
    assert "did you mean 'mine.toml'?" in refused(capsys, ["verify", "./mnie.toml"])
    assert "for a file, say './mine.toml'" in refused(capsys, ["show", "mine"])
    assert "unknown size 'tny'; did you mean 'tiny'?" in refused(capsys, ["show", "mine.toml", "--size", "tny"])
    assert "transformer: unknown size 'huge'" in refused(capsys, ["show", "transformer", "--size", "huge"])
    assert "there is no folder 'nowhere'" in refused(capsys, ["show", "mine.toml", "--parts", "nowhere"])
    assert "there is no file 'no.py'" in refused(capsys, ["verify", "no.py"])
    assert "--vocab takes a number" in refused(capsys, ["show", "mine.toml", "--vocab", "many"])
    assert "there is no folder" in refused(capsys, ["show", "mine.toml", "--png", "nowhere/x.png"])
    (mine.parent / "folder.toml").mkdir()
    assert "no recipe file" in refused(capsys, ["show", "folder.toml"])


def test_a_file_elsewhere_goes_by_its_whole_path(mine, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(UserError) as error:
        regard.build(mine, overrides=["model.heads=5"])
    assert str(error.value).startswith(f"{mine}: model.layer[0].mixer: ")
    with pytest.raises(UserError, match=r"^transformer: model\.encoder\.layer\[0\]\.mixer: "):
        regard.build("transformer", vocab=9, overrides=["model.heads=5"])


OWN = """
from regard.core import Position
class {name}(Position):
    def __init__(self, heads: int{more}):
        super().__init__()
        {body}
"""

MIXER = """
from regard.core import Mixer
class Mine(Mixer):
    def start(self, context, capacity): ...
"""

USER_PARTS = {
    "does not parse": ("mine", "def (:", "own/mine.py, line 1 does not load: SyntaxError"),
    "does not import": ("mine", "\nimport nosuchmodule", "own/mine.py, line 2 does not load", "nosuchmodule"),
    "leaves": ("mine", "import sys\nsys.exit(3)", "own/mine.py, line 2 does not load: SystemExit"),
    "another class name": (
        "mine", OWN.format(name="Yours", more="", body="pass"), "own/mine.py should define a class Mine", "holds Yours",
    ),
    "no class": ("mine", "x = 3", "own/mine.py should define a class Mine that is a Position", "holds no class"),
    "another kind": ("mine", MIXER, "own/mine.py should define a class Mine that is a Position", "holds Mine"),
    "a name that is taken": (
        "rotary", OWN.format(name="Rotary", more="", body="pass"), "two parts are called 'rotary'", "own/rotary.py",
    ),
    "a constructor that fails": (
        "mine", OWN.format(name="Mine", more="", body="self.x = heads / 0"),
        "mixer.position: mine cannot be made", "ZeroDivisionError", "own/mine.py, line 6",
    ),
    "an argument that nobody gives": (
        "mine", OWN.format(name="Mine", more=", reach: int", body="pass"), "mine needs 'reach', a whole number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", USER_PARTS)
def test_user_parts(mine, capsys, case):
    name, text, *words = USER_PARTS[case]
    (mine.parent / "own").mkdir()
    (mine.parent / "own" / f"{name}.py").write_text(text)
    told = refused(capsys, ["show", "mine.toml", "--parts", "own", "--set", f"model.layer.0.mixer.position='{name}'"])
    assert all(word in told for word in words), told


def test_a_user_mixer_without_a_step(mine, capsys):
    (mine.parent / "mine.py").write_text(MIXER)
    told = refused(capsys, ["verify", "mine.py"])
    assert "mine.py: class Mine does not define cost, step" in told


def test_a_part_of_another_kind_may_share_a_name(mine):
    """A folder of all kinds side by side: a position called like a built-in norm is no clash."""
    (mine.parent / "own").mkdir()
    (mine.parent / "own" / "layer.py").write_text(OWN.format(name="Layer", more="", body="pass"))
    regard.add_folder("own")
    regard.build("mine.toml", overrides=["model.layer.0.mixer.position='layer'"])


@pytest.fixture
def short():
    """A model whose positions reach 8."""
    made = recipe.load("transformer-decoder", "tiny", ["model.embed.position={part='learned', length=8}", "vocab=61"])
    return regard.build(made).eval()


def test_beyond_the_positions(short):
    tokens = torch.randint(61, (2, 9))
    with pytest.raises(UserError, match="sequence of 9 is longer than this model's 8 positions"):
        short(tokens)
    with pytest.raises(UserError, match="reach 8; a capacity of 9 is beyond"):
        short.start(2, 9)
    _, state = short.step(tokens[:, :7], short.start(2, 8))
    with pytest.raises(UserError, match="position 8 is beyond the model's 8 positions"):
        short.step(tokens[:, 7:], state)
    assert short.step(tokens[:, 7:8], state)[1].lengths.tolist() == [8, 8]


def test_batches(short):
    tokens = torch.randint(61, (2, 5))
    left = torch.tensor([[False, True, True, True, True], [True, True, True, True, True]])
    state = short.start(3, 8)
    with pytest.raises(UserError, match="pad on the right, never on the left"):
        short(tokens, valid=left)
    with pytest.raises(UserError, match="pad on the right, never on the left"):
        short.step(tokens, short.start(2, 8), left)
    with pytest.raises(UserError, match=r"bool tensor of shape \(2, 5\)"):
        short(tokens, valid=left[:, :4])
    with pytest.raises(UserError, match=r"bool tensor of shape \(2, 5\)"):
        short(tokens, valid=left.long())
    with pytest.raises(UserError, match="a state of 3 rows cannot continue with a batch of 2"):
        short.step(tokens, state)
    with pytest.raises(UserError, match="two dimensions"):
        short(tokens[0])
    with pytest.raises(UserError, match="two dimensions"):
        short.step(tokens[0], state)
    with pytest.raises(UserError, match="no encoder"):
        short(tokens, source=tokens)
    with pytest.raises(UserError, match="needs a source"):
        regard.build("transformer", size="tiny", vocab=61)(tokens)


def test_a_pattern_that_blinds_a_longer_sequence():
    """Not causal, so that only the batch at hand can tell."""
    layer = {"mixer": {"part": "attention", "pattern": "~window(4)"}}
    model = regard.build({"vocab": 9, "model": {"kind": "encoder", "width": 8, "layer": layer}})
    with pytest.raises(UserError, match=r"pattern '~window\(4\)' leaves position 0 with nothing to see"):
        model(torch.zeros(1, 4, dtype=torch.long))
    assert bool(torch.isfinite(model(torch.zeros(1, 8, dtype=torch.long))).all())


def test_weights(mine):
    folder = mine.parent / "saved"
    with pytest.raises(UserError, match=r"saved holds no recipe\.toml"):
        regard.restore("saved")
    regard.save(regard.build("mine.toml"), folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"^saved/model\.safetensors: is damaged or cut off"):
        regard.restore(folder)
    regard.save(regard.build("mine.toml", size="tiny"), mine.parent / "other")
    weights.write_bytes((mine.parent / "other" / "model.safetensors").read_bytes())
    with pytest.raises(
        UserError, match=r"^saved/model\.safetensors: does not fit its recipe: .*size mismatch"
    ) as error:
        regard.restore("saved")
    assert "\n" not in str(error.value)
    weights.unlink()
    with pytest.raises(UserError, match=r"^saved holds no model\.safetensors"):
        regard.restore("saved")
    (folder / "recipe.toml").write_text("model = 3")
    weights.write_bytes(whole)
    with pytest.raises(UserError, match=r"^saved/recipe\.toml: a recipe needs a \[model\]"):
        regard.restore("saved")
