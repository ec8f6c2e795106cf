"""Trees of rollouts on an MDP small enough to enumerate: the estimate's expectation is the exact gradient."""

import numpy as np
import pytest
import torch

from robo_rl.advantages import group_advantage
from robo_rl.tree_credit import Branches, credit, leaf_weights, values

H = 3  # decisions of the longest episode
THETA = np.random.default_rng(3).normal(size=(4, 2))  # logits of 2 actions in 4 states
PI = np.exp(THETA) / np.exp(THETA).sum(1, keepdims=True)
ROOTS = 2


def move(state, action, depth):
    """-> (next state, reward, over): a reward on the way, an early end, and a last one that depends on where
    one is."""
    if state == 1 and action == 1:
        return 3, 1.0, True
    after = (2 * state + action + 1) % 4
    return after, 0.25 * action + (1.5 * (after == 2) if depth == H - 1 else 0.0), depth == H - 1


def exact_gradient():
    """d E[return] / d theta, by enumerating every episode."""

    def walk(state, depth, p, ret, score):
        if depth == H:
            return p * ret * score
        out = np.zeros_like(THETA)
        for a in range(2):
            s, r, over = move(state, a, depth)
            g = score.copy()
            g[state] += np.eye(2)[a] - PI[state]
            out += walk(s, H if over else depth + 1, p * PI[state, a], ret + r, g)
        return out

    return walk(0, 0, 1.0, 0.0, np.zeros_like(THETA))


class Draw:
    """Random choices, from a generator or along a path that an enumeration gives; `p` is the probability of
    what was drawn."""

    def __init__(self, rng=None, path=()):
        self.rng, self.path, self.taken, self.options, self.p = rng, path, [], [], 1.0

    def __call__(self, probabilities):
        i = len(self.taken)
        k = (
            int(self.rng.choice(len(probabilities), p=probabilities))
            if self.rng
            else self.path[i]
            if i < len(self.path)
            else 0
        )
        self.taken.append(k)
        self.options.append(len(probabilities))
        self.p *= probabilities[k]
        return k


def every_draw(play):
    """Every way `play(draw)` can go -> (probability, result) of each."""
    path = []
    while True:
        draw = Draw(path=path)
        result = play(draw)
        yield draw.p, result
        path = draw.taken
        while path and path[-1] + 1 == draw.options[len(path) - 1]:
            path = path[:-1]
        if not path:
            return
        path = [*path[:-1], path[-1] + 1]


def play_tree(draw, rule, size=8, roots=ROOTS):
    """Branches in turn, one decision each: `rule(branches, m)` says after each decision (gate's keep and
    guess, children).

    -> (tree, states [T,G], actions [T,G], simulator steps)
    """
    live = [
        {"parent": -1, "row": 0, "state": 0, "depth": 0, "ret": 0.0, "rows": [], "over": False, "cut": False}
        for _ in range(roots)
    ]
    gates, steps = {}, 0
    while any(not (b["over"] or b["cut"]) for b in live):
        for m, b in enumerate(list(live)):
            if b["over"] or b["cut"]:
                continue
            a = draw(PI[b["state"]])
            b["rows"].append((b["state"], a))
            b["state"], r, b["over"] = move(b["state"], a, b["depth"])
            b["depth"], b["ret"], steps = b["depth"] + 1, b["ret"] + r, steps + 1
            if b["over"]:
                continue
            (keep, guess), children = rule(live, m)
            if keep < 1:
                gates[len(b["rows"]) - 1, m] = keep, guess
                b["cut"] = draw([keep, 1 - keep]) == 1
            if not b["cut"]:
                live += [
                    {**b, "parent": m, "row": len(b["rows"]), "rows": []}
                    for _ in range(min(children - 1, size - len(live)))
                ]
    n, made = len(live), np.array([len(b["rows"]) for b in live])
    keep, guess, state, action = (
        np.ones((H, n)),
        np.zeros((H, n)),
        np.zeros((H, n), int),
        np.zeros((H, n), int),
    )
    for (t, m), (p, c) in gates.items():
        keep[t, m], guess[t, m] = p, c
    for m, b in enumerate(live):
        for t, (s, a) in enumerate(b["rows"]):
            state[t, m], action[t, m] = s, a
    tree = Branches(
        np.array([b["parent"] for b in live]),
        np.array([b["row"] for b in live]),
        made,
        np.array([b["over"] for b in live]),
        np.array([b["ret"] for b in live]),
        keep,
        guess,
    )
    return tree, state, action, steps


def estimate(adv, weight, state, action, roots=ROOTS):
    """sum of w adv grad log pi over the decisions, for each root."""
    g = np.zeros_like(THETA)
    for t, m in zip(*weight.nonzero(), strict=True):
        g[state[t, m]] += weight[t, m] * adv[t, m] * (np.eye(2)[action[t, m]] - PI[state[t, m]])
    return g / roots


def plain(live, m):
    return (1.0, 0.0), 1


def forks(live, m):
    """Two or three children, where this branch is and by what another one has done: a rule that looks at all
    that is past."""
    wide = 3 if live[0]["ret"] > 0.2 and len(live) < 3 else 2
    return (1.0, 0.0), wide if live[m]["depth"] == 1 and live[m]["state"] in (1, 2) and len(live) < 5 else 1


def gates(live, m):
    """Stopped with a probability that depends on the state, and on how the other root stands."""
    keep = 0.5 if live[m]["state"] == 2 else 0.8 if live[1 - m]["ret"] > 0.2 else 1.0
    return (keep, 0.7), 1


def both(live, m):
    """A gate and a fork at the same place."""
    here = live[m]["depth"] == 1 and len(live) < 4
    return (0.6 if here else 1.0, -0.3), 2 if here else 1


@pytest.mark.parametrize("prior", [0.0, 0.5])
@pytest.mark.parametrize("rule", [plain, forks, gates, both])
def test_the_expected_estimate_is_the_exact_gradient_whatever_forks_and_stops(rule, prior):
    total, p_all, most = np.zeros_like(THETA), 0.0, 0
    for p, (tree, state, action, _) in every_draw(lambda draw: play_tree(draw, rule)):
        adv, weight = credit(tree, prior)
        total += p * estimate(adv, weight, state, action)
        p_all, most = p_all + p, max(most, len(tree.made))
    assert p_all == pytest.approx(1, abs=1e-12) and (most > ROOTS) == (rule in (forks, both))
    assert np.abs(total - exact_gradient()).max() < 1e-12


def test_the_plain_difference_of_child_and_parent_value_is_biased_and_so_is_an_episode_per_leaf():
    difference, unweighted = np.zeros_like(THETA), np.zeros_like(THETA)
    for p, (tree, state, action, _) in every_draw(lambda draw: play_tree(draw, forks)):
        adv, weight = credit(tree)
        v, family = values(tree), tree.forks()
        parent = np.zeros_like(adv)
        for m in range(len(tree.made)):
            for t in range(tree.made[m]):
                where = (
                    (m, t)
                    if t and (m, t) in family
                    else (int(tree.parent[m]), int(tree.row[m]))
                    if t == 0
                    else None
                )
                if where is not None:  # the fork where the segment of this decision began
                    at, u = where
                    members = [v[0, j] for j in family[(at, u) if at >= 0 else (-1, 0)]] + (
                        [v[u, at]] if at >= 0 else []
                    )
                    now = np.mean(members)
                parent[t, m] = now
        difference += p * estimate(v - parent, weight, state, action)
        unweighted += p * estimate(adv, (weight > 0).astype(float), state, action)
    assert (
        np.abs(difference - exact_gradient()).max() > 0.02
        and np.abs(unweighted - exact_gradient()).max() > 0.02
    )


def sampled(rule, trees, seed, roots=ROOTS, prior=0.0):
    """Estimates of `trees` trees [n,4,2] and their mean number of steps."""
    rng, out, steps = np.random.default_rng(seed), [], 0
    for _ in range(trees):
        tree, state, action, n = play_tree(Draw(rng), rule, roots=roots)
        out.append(estimate(*credit(tree, prior), state, action, roots))
        steps += n
    return np.array(out), steps / trees


@pytest.mark.parametrize("rule", [forks, gates])
def test_the_sampled_mean_lies_within_its_standard_error_of_the_exact_gradient(rule):
    got, _ = sampled(rule, 3000, 0)
    error = got.std(0, ddof=1) / len(got) ** 0.5
    moves = error > 0
    z = (got.mean(0) - exact_gradient())[moves] / error[moves]
    assert moves.sum() >= 6 and np.abs(z).max() < 4 and np.sqrt((z**2).mean()) < 2


def test_without_forks_and_gates_the_advantage_is_rloo_and_every_weight_is_one():
    outcome = np.array([1.0, 0.0, 0.0, 0.5])
    made = np.array([3, 1, 2, 3])
    tree = Branches(
        np.full(4, -1), np.zeros(4, int), made, np.ones(4, bool), outcome, np.ones((3, 4)), np.zeros((3, 4))
    )
    adv, weight = credit(tree)
    live = np.arange(3)[:, None] < made
    want = group_advantage(torch.tensor(outcome)[None], "rloo")[0].numpy()
    assert np.allclose(adv, np.where(live, want, 0)) and (weight == live).all()
    assert np.array_equal(credit(tree, 5.0)[0], adv)  # nothing comes before a root
    assert (leaf_weights(tree, weight) == 1).all()


def fork_by_hand():
    """Root 0 (2 decisions, then forks into 0, 2, 3), root 1; branch 2 forks after its first decision into 2
    and 4."""
    parent, row = np.array([-1, -1, 0, 0, 2]), np.array([0, 0, 2, 2, 1])
    made, outcome = np.array([3, 4, 2, 1, 1]), np.array([1.0, 0.0, 1.0, 0.0, 0.0])
    return Branches(parent, row, made, np.ones(5, bool), outcome, np.ones((4, 5)), np.zeros((4, 5)))


def test_values_weights_and_advantages_of_a_tree_by_hand():
    tree = fork_by_hand()
    v, (adv, weight) = values(tree), credit(tree)
    assert v[:, 0].tolist() == [0.5, 0.5, 1.0, 0.0]  # (1 + 1/2 + 0)/3 before the fork
    assert v[:2, 2].tolist() == [0.5, 1.0] and v[0, 4] == 0 and v[0, 3] == 0 and v[0, 1] == 0
    third, sixth = 1 / 3, 1 / 6
    assert np.allclose(weight[:, 0], [1, 1, third, 0]) and np.allclose(weight[:, 2], [third, sixth, 0, 0])
    assert np.allclose(weight[0], [1, 1, third, third, sixth])
    assert np.allclose(adv[:, 0], [0.5, 0.5, 1 - 0.25, 0]) and np.allclose(adv[:, 1], [-0.5] * 4)
    assert np.allclose(adv[:, 2], [0.5 - 0.5, 1 - 0, 0, 0]) and np.allclose(adv[0, 3:], [0 - 0.75, 0 - 1])
    assert np.allclose(leaf_weights(tree, weight), [third, 1, sixth, third, sixth])


def test_weighted_advantages_of_the_children_of_a_fork_sum_to_zero_and_leaves_weigh_as_much_as_roots():
    tree = fork_by_hand()
    adv, weight = credit(tree)
    assert weight[2, 0] * adv[2, 0] + weight[0, 2] * adv[0, 2] + weight[0, 3] * adv[0, 3] == pytest.approx(0)
    assert weight[1, 2] * adv[1, 2] + weight[0, 4] * adv[0, 4] == pytest.approx(0)
    assert leaf_weights(tree, weight).sum() == pytest.approx(2)


def test_a_stopped_branch_counts_as_its_guess_and_a_survivor_weighs_for_those_that_were_stopped():
    keep, guess = np.ones((2, 2)), np.zeros((2, 2))
    keep[0], guess[0] = 0.25, 0.4
    tree = Branches(
        np.full(2, -1),
        np.zeros(2, int),
        np.array([2, 1]),
        np.array([True, False]),
        np.array([1.0, 0.0]),
        keep,
        guess,
    )
    assert values(tree)[0].tolist() == [0.4 + 0.6 / 0.25, 0.4] and values(tree)[1, 0] == 1
    adv, weight = credit(tree)
    assert (
        weight[:, 0].tolist() == [1, 4]
        and weight[:, 1].tolist() == [1, 0]
        and adv[1, 0] == pytest.approx(0.6)
    )
    assert leaf_weights(tree, weight).tolist() == [4, 0]


def test_unused_columns_earn_nothing_and_a_child_that_comes_before_its_parent_is_refused():
    tree = fork_by_hand()
    wide = Branches(
        *(
            np.concatenate([x, np.zeros(1, x.dtype)])
            for x in (tree.parent, tree.row, tree.made, tree.ended, tree.outcome)
        ),
        np.ones((4, 6)),
        np.zeros((4, 6)),
    )
    for a, b in zip(credit(wide), credit(tree), strict=True):
        assert np.array_equal(a[:, :5], b) and not a[:, 5].any()
    with pytest.raises(ValueError, match="order in which they begin"):
        credit(
            Branches(
                np.array([1, -1]),
                np.zeros(2, int),
                np.ones(2, int),
                np.ones(2, bool),
                np.zeros(2),
                np.ones((1, 2)),
                np.zeros((1, 2)),
            )
        )
