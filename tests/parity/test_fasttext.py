"""fastText against its equation in plain torch: a text is the average of its words and n-grams, mapped to classes.

logits = B mean(features) + b        features: every word, and the hashed bucket of every n-gram of 2 to n words
"""

import torch
import torch.nn.functional as F

import regard
from regard.parts.embeds.ngrams import FACTOR


def bag(model, words: list[int], buckets: int, n: int) -> torch.Tensor:
    """The logits of one text, a feature at a time. Theirs divides by all features, ours by the words alone."""
    features = [model.embed.table[word] for word in words]
    for size in range(2, n + 1):
        for end in range(size, len(words) + 1):
            code = words[end - 1]
            for word in reversed(words[end - size : end - 1]):
                code = (code * FACTOR + word) % buckets
            features.append(model.embed.ngram_table[code])
    mean = torch.stack(features).mean(0) * len(features) / len(words)
    return F.linear(mean, model.head.out.weight, model.head.out.bias)


def test_logits_and_gradients():
    buckets, n = 53, 3
    sets = [f"model.embed.buckets={buckets}", f"model.embed.n={n}", "model.head.classes=5", "model.embed.std=1.0"]
    torch.manual_seed(0)
    model = regard.build("fasttext", size="tiny", vocab=61, overrides=sets).double().eval()
    texts = [torch.randint(61, (length,)).tolist() for length in (7, 1, 13, 2)]
    tokens = torch.randint(61, (4, 13))  # what stands in the padding does not matter
    valid = torch.arange(13)[None] < torch.tensor([[len(text)] for text in texts])
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    found, wanted = model(tokens, valid), torch.stack([bag(model, text, buckets, n) for text in texts])
    assert torch.allclose(found, wanted, atol=1e-12)
    weights = [model.embed.table, model.embed.ngram_table, model.head.out.weight, model.head.out.bias]
    cotangent = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad((y * cotangent).sum(), weights) for y in (found, wanted)), strict=True)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in pairs)
