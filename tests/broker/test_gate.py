"""The line to a kernel's extension: every question gets an answer or "", in time, and a line that is lost stays lost."""

import asyncio

import pytest

from provisioner.broker.gate import GateLink
from provisioner.protocol.messages import GateAnswer, GateCommand, GateVerb

LONG_S = 30.0


def answer(number: int, word: str) -> GateAnswer:
    return GateAnswer(number=number, word=word)


async def asked(link: GateLink) -> tuple[asyncio.Task[str], GateCommand]:
    """Ask, and return the question under way and the command that the extension reads."""
    question = asyncio.create_task(link.ask(GateVerb.CLOSE, LONG_S))
    command = await link.next(LONG_S)
    assert command is not None
    return question, command


async def test_an_answer_reaches_the_question_whose_number_it_repeats() -> None:
    link = GateLink(0.0)
    first, one = await asked(link)
    second, two = await asked(link)
    assert one.number != two.number
    link.take(answer(two.number, "busy"), 1.0)
    link.take(answer(one.number, "closed"), 2.0)
    assert (await first, await second) == ("closed", "busy")
    assert link.last_pulse_s == 2.0


@pytest.mark.parametrize("number", [-1, 77, 2**62])
async def test_answers_to_what_nobody_asked_are_ignored(number: int) -> None:
    link = GateLink(0.0)
    question, command = await asked(link)
    link.take(answer(number, "closed"), 1.0)
    assert not question.done()
    link.take(answer(command.number, "busy"), 1.0)
    link.take(answer(command.number, "closed"), 1.0)  # a second answer changes nothing
    assert await question == "busy"
    link.take(answer(command.number, "closed"), 1.0)  # nor one that comes after it was read


async def test_a_question_without_an_answer_ends_in_time() -> None:
    link = GateLink(0.0)
    assert await link.ask(GateVerb.CLOSE, 0.01) == ""
    command = await link.next(LONG_S)
    assert command is not None
    link.take(answer(command.number, "closed"), 1.0)  # too late: nobody waits for it
    assert link._answers == {}


async def test_a_question_that_is_given_up_is_forgotten() -> None:
    link = GateLink(0.0)
    question, _ = await asked(link)
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    assert link._answers == {}


async def test_a_line_that_closes_answers_all_questions_and_takes_no_more() -> None:
    link = GateLink(0.0)
    question, _ = await asked(link)
    link.close()
    link.close()
    assert await question == ""
    assert await link.ask(GateVerb.SHRINK, LONG_S) == ""
    link.send(GateVerb.OPEN)
    assert await link.next(LONG_S) is None
    assert await link.next(LONG_S) is None


async def test_what_was_said_before_a_line_closed_is_still_read() -> None:
    link = GateLink(0.0)
    link.send(GateVerb.NOTICE, sentence="first")
    link.close()
    command = await link.next(LONG_S)
    assert command is not None
    assert command.sentence == "first"
    assert await link.next(LONG_S) is None


async def test_an_extension_that_reads_nothing_has_lost_the_line() -> None:
    link = GateLink(0.0)
    question, _ = await asked(link)
    while not link.closed:
        link.send(GateVerb.NOTICE, sentence="again")
    assert await question == ""
    read = [await link.next(LONG_S) for _ in range(link._queue.qsize())]
    assert read[-1] is None, "the reader learns that it is over"


async def test_silence_is_kept_alive() -> None:
    assert await GateLink(0.0).next(0.01) == GateCommand()


async def test_a_cell_is_exempt_from_when_it_says_so_until_another_answer_that_is_no_pulse() -> None:
    link, exempt = GateLink(0.0), []
    for word in ("pulse", "exempt", "pulse", "open", "pulse"):
        link.take(answer(0, word), 1.0)
        exempt.append(link.exempt)
    assert exempt == [False, True, True, False, False]
