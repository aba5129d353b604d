"""An assert test is split: the code under test receives the calls, and not the expected results."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.errors import UserError
from skyasync.rewards.asserts import split

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=8,
)


@given(PLAIN, PLAIN)
def test_a_call_that_must_equal_a_literal_is_sent_alone(given: object, wanted: object) -> None:
    found = split(f"assert f({given!r}) == {wanted!r}, 'why'")
    ((kind, source),) = found.steps
    assert kind == "value" and ast.dump(ast.parse(source)) == ast.dump(ast.parse(f"f({given!r})"))
    assert found.literal == wanted and type(found.literal) is type(wanted)


@pytest.mark.parametrize(
    ("test", "sent"),
    [
        ("assert sorted(f(1)) == [99]", ["f(1)"]),
        ("import math\nassert math.isclose(f(1), 99, rel_tol=1e-6)", ["import math", "f(1)"]),
        ("assert abs(f(2) - 99) < 1e-6", ["f(2)"]),
        ("assert 99 == f(2)", ["f(2)"]),
        ("assert f(1).startswith('99')", ["f(1)"]),
        ("assert Solution().f(1).count('99') == 99", ["Solution().f(1)"]),
        ("assert Stack(1).pop() == 99", ["Stack(1).pop()"]),
        ("assert f(1)[0] == 99", ["f(1)[0]"]),
        ("assert all(v == 99 for v in f(3))", ["f(3)"]),
        ("assert [f(i) for i in range(3)] == [99]", ["[f(i) for i in range(3)]"]),
        ("assert sum(1, 2) == 99", ["sum(1, 2)"]),  # a function that is named like a built-in one
        ("a = 1\nb = 99\nassert f(a) == b", ["a = 1", "f(a)"]),
        ("a = 1\nc = a + 1\nb = 99\nb = b + 99\nassert f(c) == b", ["a = 1", "c = a + 1", "f(c)"]),
        ("x = [2]\nf(x)\nassert x == [99]", ["x = [2]", "f(x)", "x"]),
        (
            "s = S()\ns.push(1)\nassert s.pop() == 99\nassert s.size == 99",
            ["s = S()", "s.push(1)", "s.pop()", "s.size"],
        ),
        ("assert f(1) == 99 and not g(2) or {99: h(3)}", ["f(1)", "g(2)", "h(3)"]),
        ("assert f(lambda x: x + 1) == 99", ["f(lambda x: x + 1)"]),
        ("assert list(map(f, [1, 2])) == [99]", ["map(f, [1, 2])"]),
        ("assert sorted([2, 1], key=f) == [99]", ["sorted([2, 1], key=f)"]),
        ("y = f(1)\nassert max(y, 99) == 99", ["y = f(1)", "y"]),
        ("from solution import f\nassert len(f(1)) == 99", ["f(1)"]),
        ("import pickle\nassert pickle.loads(f(1)) == 99", ["import pickle", "pickle.loads(f(1))"]),
        ("assert eval(f(1)) == 99", ["eval(f(1))"]),
        ("x = [99]\nx.sort()\nassert f(1) == x", ["f(1)"]),
        ("assert f(lambda x: x > 1) == 99", ["f(lambda x: x > 1)"]),
        ("assert list(map(lambda x: f(x), [1])) == [99]", ["map(lambda x: f(x), [1])"]),
        (
            "import numpy\nnumpy.testing.assert_allclose(f(1), 99)\nassert g(1) == 99",
            ["import numpy", "f(1)", "g(1)"],
        ),
    ],
)
def test_expected_results_stay_in_the_reward_process(test: str, sent: list[str]) -> None:
    found = split(test)
    assert [source for _, source in found.steps] == sent
    assert "99" in found.check


@pytest.mark.parametrize(
    "test",
    [
        "for i in [1]: assert f(i) == 1",
        "assert all(f(x) == y for x, y in [(1, 2)])",
        "assert all(math_close(f(x), y) == 1 for x, y in [(1, 2)])",
        "a, b = 1, 2\nassert f(a) == b",
        "def check(g): assert g(1) == 2\ncheck(f)",
        "try:\n    f(1)\nexcept ValueError:\n    pass",
        "f(1)",
        "assert (",
        "assert " + "(" * 9999,
        "assert " + "not " * 500 + "f(1)",
        "assert f(1)" + ".a" * 900,
    ],
)
def test_a_test_that_cannot_be_split_is_rejected_in_one_line(test: str) -> None:
    with pytest.raises(UserError, match=r"reward function code_tests: the test '") as raised:
        split(test)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "test",
    [
        "ok = f(1) == 99\nassert ok",
        "assert (ok := f(1) == 99)",
        "assert (lambda: f(1) == 99)()",
        "assert all(map(lambda pair: f(pair[0]) == pair[1], [(1, 99)]))",
        "x = f(1)\nok = x in [99]\nassert ok",
        "import torch\nassert torch.allclose(f(1), torch.tensor([99.0]))",
        "from torch import equal\nassert equal(f(1), 99)",
        "import torch\ntorch.testing.assert_close(f(1), 99)\nassert f(2)",
        "self.assertEqual(f(1), 99)\nassert f(2)",
    ],
)
def test_a_test_whose_result_the_code_would_decide_is_rejected(test: str) -> None:
    with pytest.raises(UserError, match="leaves it to the code's process to decide"):
        split(test)
