"""Whatever is proposed to it, a sampler with seeds takes what it draws token by token, to the bit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.drafts import num_taken
from tests.support.tiny_policy import VOCAB_SIZE, make_weights, score

OPERATORS, WEIGHTS, PROMPT, LENGTH = CpuOperators(), make_weights(3), [4, 7], 12

TOKENS = st.integers(0, VOCAB_SIZE - 1)


def drawn_after(context, seed):
    """The token after a context, and its log-probability."""
    log_probs = score(WEIGHTS, context, 1.0, is_rounded=False)[None]
    place = torch.tensor([len(context) - 1])
    token = OPERATORS.sample(log_probs, OPERATORS.uniform(torch.tensor([seed]), place))
    return int(token), log_probs[0, int(token)]


def one_by_one(seed):
    context, found = [*PROMPT], []
    while len(found) < LENGTH:
        found.append(drawn_after(context, seed))
        context.append(found[-1][0])
    return found


def of_drafts(seed, drafts, take):
    """The same from as many passes as there have to be; `drafts`: what is proposed, pass after pass."""
    context, found, num_passes = [*PROMPT], [], 0
    while len(found) < LENGTH:
        draft = drafts[num_passes % len(drafts)](len(found))
        num_passes += 1
        contexts = [context + draft[:count] for count in range(len(draft) + 1)]
        drawn = [drawn_after(each, seed) for each in contexts]
        count = take(draft, drawn, contexts)
        found += drawn[:count]
        context += [token for token, _ in drawn[:count]]
    return found[:LENGTH], num_passes


def by_draws(draft, drawn, contexts):
    tokens = torch.tensor([[token for token, _ in drawn]])
    (count,) = num_taken(torch.tensor([draft], dtype=torch.long), tokens).tolist()
    return count


def by_agreement_anywhere(draft, drawn, contexts):
    """Wrong: counts drafted tokens behind one that was not drawn."""
    return 1 + sum(token == other for token, (other, _) in zip(draft, drawn, strict=False))


def is_equal(found, expected):
    return [t for t, _ in found] == [t for t, _ in expected] and torch.equal(
        torch.stack([x for _, x in found]), torch.stack([x for _, x in expected])
    )


@given(st.integers(0, 2**62), st.lists(st.lists(TOKENS, max_size=5), min_size=1, max_size=4))
def test_any_draft_gives_the_tokens_and_numbers_of_sampling_one_by_one(seed, drafts):
    found, _ = of_drafts(seed, [lambda _, draft=draft: draft for draft in drafts], by_draws)
    assert is_equal(found, one_by_one(seed))


@given(st.integers(0, 2**62), st.integers(0, 4))
def test_a_draft_that_is_right_for_a_while_saves_so_many_passes(seed, right):
    expected = one_by_one(seed)
    tokens = [token for token, _ in expected] + [0] * 9

    def draft(done):
        wrong = (tokens[done + right] + 1) % VOCAB_SIZE
        return [*tokens[done : done + right], wrong, *tokens[done + right + 1 : done + 4]]

    found, num_passes = of_drafts(seed, [draft], by_draws)
    assert is_equal(found, expected)
    assert num_passes == -(-LENGTH // (right + 1))


def test_a_rule_that_takes_what_comes_after_another_token_gives_other_samples():
    drafts = [lambda _, i=i: [i, (i * 5 + 1) % VOCAB_SIZE, 3, i] for i in range(VOCAB_SIZE)]
    found = [of_drafts(seed, drafts, by_agreement_anywhere)[0] for seed in range(20)]
    assert not all(is_equal(f, one_by_one(seed)) for seed, f in enumerate(found))


def test_speculative_sampling_as_published_gives_other_samples():
    """A token of a draft that is certain of it is taken with its probability under the policy, and else
    one is drawn from the others."""

    def one_token(seed, context, proposed):
        log_probs = score(WEIGHTS, context, 1.0, is_rounded=False)
        number = OPERATORS.uniform(torch.tensor([seed]), torch.tensor([len(context) - 1]))
        if float(number) < float(log_probs[proposed].exp()):
            return proposed
        others = log_probs.clone()
        others[proposed] = -torch.inf
        return int(OPERATORS.sample(torch.log_softmax(others, -1)[None], number))

    seeds = range(50)
    assert [one_token(s, PROMPT, 5) for s in seeds] != [drawn_after(PROMPT, s)[0] for s in seeds]
