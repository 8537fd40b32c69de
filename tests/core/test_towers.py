"""Two towers: what their scores are, how a text ends, what is refused, and that they are saved and drawn."""

import pytest
import torch

import regard
from regard.core import Towers, UserError, load, models_in
from regard.data.batches import Batch
from regard.look import anatomy
from regard.look import recipe as picture
from regard.parts.objectives.contrastive import Contrastive

TINY = ["model.image.depth=1", "model.image.width=12", "model.image.heads=3", "model.image.embed.image=8",
        "model.text.depth=2", "model.text.width=10", "model.text.heads=2", "model.image.head.dim=7",
        "model.text.head.dim=7"]  # fmt: skip


def make(*more: str, vocab: int = 31) -> Towers:
    torch.manual_seed(0)
    return regard.build("clip", "tiny", vocab, [*TINY, *more]).double().eval()


@torch.no_grad()
def test_scores_are_scaled_cosines():
    model = make("model.end=30")
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    tokens = torch.randint(29, (4, 6))
    tokens[:, -1] = 30
    scores = model(images, tokens)
    assert scores.shape == (3, 4)
    for i in range(3):
        for t in range(4):
            one, two = model.image(images[i : i + 1])[0], model.text(tokens[t : t + 1])[0]
            cosine = torch.nn.functional.cosine_similarity(one, two, dim=0)
            assert float(scores[i, t]) == pytest.approx(float(model.scale.exp() * cosine), rel=1e-9)
    assert torch.equal(
        model.similarity(model.encode_images(images), model.encode_texts(tokens), max_scale=2.0),
        scores / model.scale.exp() * 2,
    )


@pytest.mark.parametrize("end", [5, None])
def test_a_text_ends_at_its_end(end):
    """What stands behind the first end token, or behind the largest number, changes nothing."""
    model = make(*([] if end is None else [f"model.end={end}"]))
    last = 30 if end is None else end
    tokens = torch.tensor([[1, 2, last, last, 7], [3, last, 0, 0, 0], [4, 4, 2, 1, last]])
    whole = model.encode_texts(tokens)
    for row, length in enumerate((3, 2, 5)):
        alone = tokens[row : row + 1, :length]
        assert torch.allclose(model.encode_texts(alone)[0], whole[row], atol=1e-12)
        assert torch.allclose(torch.nn.functional.normalize(model.text(alone), dim=-1)[0], whole[row], atol=1e-12)
    other = tokens.clone()
    other[0, 3:], other[1, 2:] = 6, 9
    assert torch.allclose(model.encode_texts(other), whole, atol=1e-12)
    other[0, 0] = 8
    assert not torch.allclose(model.encode_texts(other)[0], whole[0], atol=1e-3)
    padded = torch.tensor([[1, 2, last], [3, last, last]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    assert torch.allclose(model.encode_texts(padded, valid), whole[:2], atol=1e-12)


@torch.no_grad()
def test_contrastive_loss():
    model = make()
    batch = Batch(torch.randint(31, (5, 6)), torch.arange(5), source=torch.randn(5, 3, 8, 8).double(), count=5)
    found = Contrastive()(model, batch)
    p = model(batch.source, batch.tokens).float()
    want = -(p.log_softmax(1).diagonal() + p.log_softmax(0).diagonal()).sum() / 2
    assert float(found.loss) == pytest.approx(float(want), rel=1e-5)
    with torch.no_grad():
        model.scale.fill_(9.0)
    assert Contrastive()(model, batch).loss < 5 * 220  # the scale is held at 100


def test_saved_and_restored(tmp_path):
    model = make("model.end=30").float()
    regard.save(model, tmp_path)
    again = regard.restore(tmp_path).eval()
    given = model.random_inputs(2, 5)
    assert torch.equal(model(**given), again(**given))
    assert (again.end, again.kind, list(models_in(again))) == (30, "towers", ["image", "text"])
    assert list(models_in(again.text)) == [""]


def test_drawn(tmp_path):
    model = make().float()
    drawn = anatomy.describe(model)
    assert [tower.side for tower in drawn.towers] == ["image", "text"]
    assert [tower.width for tower in drawn.towers] == [7, 7]
    assert [s.side for s in drawn.spent] == ["image", "text"]
    text = picture.text(drawn)
    assert "scores (images, texts)" in text
    assert "image mixer" in text
    picture.png(drawn, tmp_path / "clip.png")
    assert (tmp_path / "clip.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.image.head.dim=5"], "not 5 and 7"),
        (["model.text.head={part='vocabulary'}"], "model.text: must be an encoder or a decoder"),
        (["model.image.widht=3"], "did you mean 'width'"),
        (["model.text.layer.0.mixer.pattern=everything"], "looks ahead"),
        (["model.txet={}"], "did you mean 'model.text'"),
        (["model.image=3"], "image"),
    ],
)
def test_refused(more, message):
    with pytest.raises(UserError) as error:
        make(*more)
    assert message in str(error.value)


def test_sizes_are_those_of_the_paper():
    """Parameters of ViT-B/32 and ViT-L/14 with 49,408 tokens."""
    from regard.look.sketch import parameters_of_recipe

    counts = {size: parameters_of_recipe(load("clip", size) | {"vocab": 49408}) for size in ("base", "large")}
    assert counts == {"base": 151_277_313, "large": 427_616_513}
