"""The judge's process: it alone holds what is hidden, and writes one evidence message.

Order is the defence. The judge closes its memory to processes of its own user, forks the
candidate's process while it knows nothing, and only then reads the hidden material from standard
input; it writes only when every process that ever held candidate code is dead.
"""

from __future__ import annotations

import builtins
import os
import sys
import time

from agentrl.verifiers.code.runner import child
from agentrl.verifiers.code.runner.candidate import (
    PACKAGES,
    Candidate,
    Gone,
    end_all,
    is_answer,
    prctl,
    raised_name,
)
from agentrl.verifiers.code.runner.codec import Writer, decode, encode, matches

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

else:
    import _signal as signal  # the C part alone: the enums of signal.py cost 4 ms

_DUMPABLE, _SUBREAPER = 4, 36


class Broken(Exception):
    """The hidden material itself is at fault, whatever the candidate is."""


def main(read_exactly: Callable[[int], bytes]) -> None:
    """Judge one candidate: hidden material comes in on standard input, evidence goes out."""
    prctl(_DUMPABLE, 0)
    prctl(_SUBREAPER, 1)
    candidate = Candidate()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the candidate may send it, and it would look like our own fault
    request = decode(read_exactly(int.from_bytes(read_exactly(4), "little")))
    verdict = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    evidence = _judge(candidate, request)
    evidence["survived"] = not end_all()
    evidence["calls"] = candidate.calls
    frame = memoryview(request["nonce"] + encode(evidence))
    while frame:
        frame = frame[os.write(verdict, frame) :]
    os._exit(0)


def _judge(candidate: Candidate, request: dict[str, Any]) -> dict[str, Any]:
    """Outcomes, one letter for each expected case or test: p passed, f failed, - not reached."""
    outcomes = ["-"] * request["count"]
    evidence: dict[str, Any] = {"outcomes": "", "fact": "", "broken": "", "notes": []}
    candidate.call_s = request["call_s"]
    candidate.deadline = time.monotonic() + request["wall_s"]
    request["notes"] = evidence["notes"]

    def on_alarm(number: int, frame: Any) -> None:
        raise candidate.leave("time_limit")

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, request["wall_s"], 1.0)
    try:
        _FORMS[request["form"]](candidate, request, outcomes)
    except Gone as gone:
        evidence["fact"] = gone.fact
    except Broken as broken:
        evidence["broken"] = str(broken)
    except MemoryError:
        evidence["fact"] = "memory"
    except BaseException as error:  # noqa: BLE001  nothing may end the judge without evidence
        evidence["broken"] = f"the judge failed: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    if candidate.gone:
        evidence["fact"] = candidate.gone
    evidence["outcomes"] = "".join(outcomes)
    return evidence


def _load(candidate: Candidate, request: dict[str, Any]) -> None:
    answer = candidate.request("load", request["path"], request["entry_point"])
    if not is_answer(answer, "raised") and answer != ("ok",):
        raise Gone("ended")
    if answer != ("ok",):
        candidate.gone = f"import:{raised_name(answer)}"
        raise Gone(candidate.gone)


def _judge_cases(candidate: Candidate, request: dict[str, Any], outcomes: list[str]) -> None:
    _load(candidate, request)
    for index, (args, kwargs, want) in enumerate(request["cases"]):
        candidate.calls += 1
        answer = candidate.request("call", tuple(args), kwargs)
        passed = is_answer(answer, "value") and matches(answer[1], want, request["atol"])
        outcomes[index] = "p" if passed else "f"


def _judge_draws(candidate: Candidate, request: dict[str, Any], outcomes: list[str]) -> None:
    import random

    reference = _hidden_function(request["reference"], request["entry_point"])
    generate = _hidden_function(request["generate"], "generate")
    rng = random.Random(request["seed"])
    _load(candidate, request)
    for index in range(len(outcomes)):
        try:
            args = encode(tuple(generate(rng)))
            want = _carried(reference(*decode(args)))
        except Gone:
            raise Broken("no case could be generated within the time limit") from None
        except Exception as error:
            why = "generate(rng) returns the arguments of one call as a tuple"
            raise Broken(f"no case could be generated: {type(error).__name__}; {why}") from error
        candidate.calls += 1
        answer = candidate.request("call", decode(args), {})
        passed = is_answer(answer, "value") and matches(answer[1], want, request["atol"])
        outcomes[index] = "p" if passed else "f"


def _carried(value: Any) -> Any:
    """A value of the reference as one of the candidate would arrive."""
    pieces: list[bytes] = []
    Writer(pieces.append, child.reduce).send(value)
    return decode(b"".join(pieces))


def _hidden_function(text: str, name: str) -> Callable[..., Any]:
    """A function that hidden text defines.

    Raises:
        Broken: the text cannot be loaded, or defines no such function.
    """
    from agentrl.verifiers.code.runner import lazy

    sys.path.append(PACKAGES)
    lazy.install()
    hidden: dict[str, Any] = {"__name__": "hidden", "__builtins__": builtins}
    try:
        exec(compile(text, "hidden", "exec"), hidden)
    except Exception as error:
        raise Broken(
            f"the hidden text of {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    function = hidden.get(name)
    if not callable(function):
        raise Broken(f"the hidden text defines no function named {name}")
    return function  # type: ignore[no-any-return]


def _judge_check(candidate: Candidate, request: dict[str, Any], outcomes: list[str]) -> None:
    check = _hidden_function(request["check"], "check")
    _load(candidate, request)
    try:
        check(candidate)
    except Exception as error:  # noqa: BLE001  the reference passes: whatever a check raises is the candidate's failure
        outcomes[0] = "f"
        candidate.gone = candidate.gone or f"check:{type(error).__name__[:60]}"
    else:
        outcomes[0] = "f" if candidate.gone else "p"


def _judge_tests(candidate: Candidate, request: dict[str, Any], outcomes: list[str]) -> None:
    """Tests that run here and use the candidate from afar."""
    from agentrl.verifiers.code.runner import lazy, minitest, proxy, pytest_run

    _check_pytest(request)
    uses = None if request["uses"] is None else set(request["uses"])
    files = request["tests"]
    judge = proxy.Judge(candidate, uses, set(request["widened"]), files)
    sys.path.append(PACKAGES)
    if not request["by_pytest"]:
        lazy.install()
    proxy.install_modules(request["modules"])
    runner = pytest_run.run if request["by_pytest"] else minitest.run
    try:
        for test, outcome in runner(files, judge):
            outcomes[request["ids"].index(test)] = outcome
    except Exception as error:  # noqa: BLE001  a test file that cannot be loaded has no outcome
        candidate.gone = candidate.gone or f"import:{type(error).__name__[:60]}"
    finally:
        request["notes"] += sorted(judge.record)


def _check_pytest(request: dict[str, Any]) -> None:
    if request["by_pytest"] and not os.path.exists(f"{PACKAGES}/pytest"):
        raise Broken(
            f"tests with fixtures or a conftest.py need pytest in {PACKAGES} of the grader's image"
        )


_FORMS = {
    "cases": _judge_cases,
    "generate": _judge_draws,
    "check": _judge_check,
    "tests": _judge_tests,
}
