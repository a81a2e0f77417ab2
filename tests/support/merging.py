"""What GTP+'s merging must give by its definition, in float64 and one token at a time.

Of nearly equal costs or similarities rounding decides, and implementations may decide differently: then each must be
right by the definition. Tokens of one channel are the extreme case: all their cosines are 1 or -1.
"""

import pytest
import torch


def by_definition(x, branch, importance, size, removed, floor, keep_norm, kept, gone, target):
    """What merging one image by these decisions must give; and each token's cost, the cosines and the ranks."""
    features, prefix = (x.double() + branch.double())[0], x.shape[1] - importance.shape[1]
    image, importance, size = features[prefix:], importance[0].double(), size[0].double()
    unit = image / image.norm(dim=1, keepdim=True).clamp(min=1e-12)
    order = importance.sort(descending=True, stable=True).indices.tolist()
    cosine, cost = unit @ unit.T, torch.full((len(order),), torch.inf, dtype=torch.float64)
    for rank, token in enumerate(order):
        before = order[:rank]
        if before:
            apart = (1 - cosine[token, before]).clamp(min=0) * (
                size[token] * size[before] / (size[token] + size[before])
            ).sqrt()
            cost[token] = (importance[token] / importance.mean() + floor) * apart.min()
    wanted = []
    for place, token in enumerate(kept[0].tolist()):
        group = [token, *(g for g, t in zip(gone[0].tolist(), target[0].tolist(), strict=True) if t == place)]
        mean = (size[group].unsqueeze(1) * image[group]).sum(dim=0) / size[group].sum()
        if keep_norm and len(group) > 1:
            mean = mean * image[group].norm(dim=1).max().clamp(min=1e-12) / mean.norm().clamp(min=1e-12)
        wanted.append((mean, float(size[group].sum())))
    ranks = {token: rank for rank, token in enumerate(order)}
    return (
        torch.cat([features[:prefix], torch.stack([m for m, _ in wanted])]),
        [s for _, s in wanted],
        cost,
        cosine,
        ranks,
    )


def check_merged(arguments, norm, results):
    """Assert that the results of one image are right by the definition: who goes, to whom, and what comes of it."""
    x, branch, importance, size, removed, floor, keep_norm = arguments
    size = torch.ones_like(importance) if size is None else size
    features, normed, new_size, kept, gone, target = results
    assert gone.shape[1] == removed
    assert sorted(kept[0].tolist() + gone[0].tolist()) == list(range(importance.shape[1]))
    assert kept[0].tolist() == sorted(kept[0].tolist())
    assert gone[0].tolist() == sorted(gone[0].tolist())
    wanted, sizes, cost, cosine, ranks = by_definition(
        x, branch, importance, size, removed, floor, keep_norm, kept, gone, target
    )
    if removed:
        assert cost[gone[0]].max() <= cost[kept[0]].min() * (1 + 1e-4) + 2e-3 * (1 + floor)
    for token, place in zip(gone[0].tolist(), target[0].tolist(), strict=True):
        offers = [cosine[token, other] for other in kept[0].tolist() if ranks[other] < ranks[token]]
        receiver = int(kept[0, place])
        assert ranks[receiver] < ranks[token]
        assert cosine[token, receiver] >= max(offers) - 1e-5
    assert new_size[0].tolist() == pytest.approx(sizes)
    scale = float(wanted.abs().max().clamp(min=1e-30))
    length = wanted.norm(dim=1, keepdim=True)
    opposed = keep_norm and bool((length < 1e-3 * scale).any())  # they cancel: what is left is rounding
    if not opposed:
        torch.testing.assert_close(features[0].double() / scale, wanted / scale, rtol=1e-4, atol=1e-4)
    weight, bias, epsilon = norm
    if weight is not None:
        after = torch.nn.functional.layer_norm(features, weight.shape, weight, bias, epsilon)
        torch.testing.assert_close(normed, after, rtol=1e-4, atol=5e-3)
