"""Which cells need the GPU: none that does is missed."""

import ast
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager, cell_magic, leading_empty_lines

from fractional_gpu_kernel.cells.gate import BURST, SENTINEL, burst_of, make_cell_transform, needs_gpu


def manager() -> TransformerManager:
    made = TransformerManager()  # type: ignore[no-untyped-call]
    made.cleanup_transforms.append(make_cell_transform(cell_magic, leading_empty_lines))
    return made


def asks(cell: str) -> bool:
    return needs_gpu(manager().transform_cell(cell))


@pytest.mark.parametrize(
    "cell",
    [
        "%gpu",
        "  %gpu status",
        "\n\n# first look\n%gpu\n%gpu suspend\n",
        "%gpu?",
        "?%gpu",
        "%gpu??",
        "%%cpu?",
        "%%gpu?",
        ">>> %gpu",
        "In [3]: %gpu status",
        "%%cpu\nimport torch",
        "\n  \n%%cpu\nx = 1",
        "%%cpu  \n%%time\nx = 1",
        "%%cpu",
        "%%gpu measure\ntrain(model)",
        "\n%%gpu  measure --within 2m --setup 1-3\n\n%%time\ntorch.ones(3)",
        "# only a thought",
        "\n  # torch.cuda.synchronize()\n\n#%gpu\n",
    ],
)
def test_these_do_not_need_it(cell: str) -> None:
    assert not asks(cell)


@pytest.mark.parametrize(
    "cell",
    [
        "x = 1",
        "%gpu\nx = 1",
        "x = %gpu",
        "%gpu status {torch.cuda.memory_allocated()}",
        "%gpu $tensor",
        "%gpus",
        "%gpu; ",
        "%time model(x)",
        "!gpu",
        "'''\n%gpu\n'''",
        "'get_ipython().run_line_magic(\\'gpu\\', \\'\\')'",
        "f(get_ipython().run_line_magic('gpu', ''))",
        "get_ipython().run_line_magic('gpu', f())",
        "get_ipython().run_line_magic('gpu', ''); x",
        "def f(:\n%gpu",
        "%pinfo tensor",
        "tensor?",
        "x = 1\n%%cpu",
        " x\n%%cpu",
        "%%cpux\n1",
        "%%cpu quiet\n1",
        "%%time\n%%cpu\nx",
        "%%time\n%gpu",
        "%%gpu 1\n%gpu status",
        "%%gpu\n1",
        "%%gpu measured\n1",
        "%%gpu measure {torch.ones(3)}\n1",
        "%%gpu measure --within $span\n1",
        "%%time\n%%gpu measure\n1",
        "get_ipython().run_cell_magic('gpu', 'measure', f())",
        "get_ipython().run_cell_magic('gpu', '1', '1')",
        "%%gpu 1\n# nothing",
        "# first\nx",
        "#\x0cx = 1\x0cy",
    ],
)
def test_these_need_it(cell: str) -> None:
    assert asks(cell)


def test_the_rest_of_a_cpu_cell_keeps_its_line_numbers_and_its_magic() -> None:
    assert manager().transform_cell("%%cpu\nx = 1\ny") == SENTINEL + "x = 1\ny\n"
    assert (
        manager().transform_cell("%%cpu\n\n%%time\ny")
        == SENTINEL + "get_ipython().run_cell_magic('time', '', 'y\\n')\n"
    )
    assert manager().transform_cell("%%cpu\n%%cpu\ny") == SENTINEL + SENTINEL + "y\n"


@pytest.mark.parametrize(
    ("cell", "burst"),
    [
        ("%%gpu 1/2\nx", "1/2"),
        ("\n%%gpu 1 --memory 20GiB  \n\nx = await y", "1 --memory 20GiB"),
        ("%%gpu\nx", ""),
        ("%%gpu 1\n%%time\nx", "1"),
        ("%%gpus 1\nx", None),
        ("x\n%%gpu 1", None),
        ("%%gpu measure --fractions 1\nx", None),
        ("%gpu 1", None),
        ("%%cpu\n%%gpu 1\nx", None),
    ],
)
def test_a_burst_is_known_by_its_first_line(cell: str, burst: str | None) -> None:
    assert burst_of(manager().transform_cell(cell)) == burst


def test_the_rest_of_a_burst_is_an_ordinary_cell() -> None:
    assert manager().transform_cell("%%gpu 1/2\nx = 1\ny") == BURST + "1/2\nx = 1\ny\n"
    assert (
        manager().transform_cell("%%gpu 1/2\n%%time\ny")
        == BURST + "1/2\nget_ipython().run_cell_magic('time', '', 'y\\n')\n"
    )


OWN_LINES = st.sampled_from(["%gpu", "%gpu status", "  # a comment", "", "%gpu help", "#%gpu"])
OTHER_LINES = st.sampled_from(
    ["x = 1", "%time x", "%gpu {x}", "print('%gpu')", "x = %gpu", "!nvidia-smi", "f(\n)", "await g()"]
)


@given(st.lists(OWN_LINES, min_size=1), OTHER_LINES, st.data())
def test_one_line_of_work_among_any_gpu_lines_needs_it(own: list[str], other: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(own)))
    assert asks("\n".join([*own[:at], other, *own[at:]]))


@given(st.lists(OWN_LINES, min_size=1).filter(lambda lines: any(line.startswith("%") for line in lines)))
def test_any_mix_of_gpu_lines_comments_and_blanks_does_not_need_it(lines: list[str]) -> None:
    assert not asks("\n".join(line.strip() for line in lines))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_whatever_text_it_is_given_it_answers_and_plain_text_needs_it(text: str) -> None:
    comment = all(not line.strip() or line.strip().startswith("#") for line in text.splitlines())
    assert needs_gpu(text) or text.startswith(SENTINEL) or comment


@given(st.text(alphabet="#ab=\n\r\x0b\x0c\x1c\x85\u2028 \t\\'\"", max_size=30).map("#".__add__))
def test_what_passes_as_a_comment_runs_nothing(text: str) -> None:
    if not needs_gpu(text) and not text.startswith(SENTINEL):
        with suppress(SyntaxError):  # then nothing runs either
            assert ast.parse(text).body == []


@given(st.text(alphabet="%gpuc \n\t#'\"(){}=;x?!", max_size=40))
def test_odd_cells_that_do_not_need_it_consist_of_our_magics_alone(cell: str) -> None:
    try:
        transformed = manager().transform_cell(cell)
    except SyntaxError:
        return
    if not needs_gpu(transformed) and not transformed.startswith(SENTINEL):
        # (nothing at all, if it is a comment)
        for statement in ast.parse(transformed).body:
            assert ast.unparse(statement).startswith(
                ("get_ipython().run_line_magic('gpu'", "get_ipython().run_line_magic('pinfo")
            )
