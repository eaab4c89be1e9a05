"""`mats` from its first moment on: signals, output, and what exit codes mean.

0: done. 1: something the user can put right (also a wrong option). 2: a bug of ours.
130, 143: interrupted by Ctrl-C, by SIGTERM. Nothing heavy is imported before signals are heard.
"""

import errno
import gc
import os
import signal
import sys
from collections.abc import Sequence

from matsmerge.cli.interruption import Listener
from matsmerge.cli.streams import output_failure, protect_streams


def main() -> None:
    """Run a command and exit."""
    listener = Listener()
    listener.begin()
    protect_streams()
    # Hundreds of thousands of objects are imported, and stay: looking for garbage among them again
    # and again took a fifth of the time to start.
    gc.set_threshold(20_000, 20)
    import matsmerge.cli.commands  # noqa: F401

    code = 1
    try:
        listener.starting = False
        code = run(sys.argv[1:], listener)
    except KeyboardInterrupt:  # between two lines of `run`
        listener.end()
        code = _interrupted(sys.argv[1:], listener.number)
    listener.end()
    if listener.number is not None:  # nothing may be waited for that a signal left half done
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    gc.freeze()  # nothing will be made again: looking for garbage in all that was imported is slow
    sys.exit(code)


def run(arguments: Sequence[str], listener: Listener | None = None) -> int:
    """Run a command; returns its exit code."""
    from matsmerge.cli.commands import COMMANDS, CommandError, call
    from matsmerge.errors import MatsError, OutputError, machine_gave_out

    code = 1
    try:
        _check_text(arguments)
        code = call(arguments or ["--help"])
        failure = output_failure()
        if failure is not None:
            raise OutputError(f"standard output: cannot be written ({failure})")
        return code
    except (Exception, KeyboardInterrupt) as error:
        received = listener.number if listener else None
        # What else fails after a signal fails because of it: workers that ended, say.
        if received is not None or isinstance(error, KeyboardInterrupt):
            if listener:
                listener.end()
            return _interrupted(arguments, received or _number_of(error))
        from matsmerge.cli.consoles import show_problems, stderr

        if isinstance(error, MatsError):
            show_problems(error.problems)
        elif isinstance(error, CommandError):
            show_problems([error.format_message()])
            command = f"mats {arguments[0]}" if arguments[0] in COMMANDS else "mats"
            stderr.print(f"see {command} --help")
        elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            show_problems([f"{str(error.filename)[:60]}…: is too long for a name or path"])
        elif machine_gave_out(error):
            show_problems([f"{_gave_out(error)}{_how_to_continue(arguments)}"])
        else:
            import traceback

            stderr.print(traceback.format_exc(), soft_wrap=True)
            show_problems(
                [
                    "this is a bug in matsmerge, please report it with the lines above; nothing "
                    "was lost"
                ]
            )
            return 2
    return 1


def _gave_out(error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"the machine, or a limit on this process, gave out ({reason[:200]}); end other programs, "
        "raise the limit (ulimit), or give it less to do at once (--workers, --batch-size)"
    )


def _check_text(arguments: Sequence[str]) -> None:
    """Refuse names that no model card or manifest could hold."""
    from matsmerge.errors import RecipeError

    problems = []
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="backslashreplace").decode()
            problems.append(f"'{shown}': holds bytes that are no UTF-8; rename it, or use a link")
    if problems:
        raise RecipeError(problems)


def _number_of(error: BaseException) -> int:
    """The signal that an exception is about; those that do not say are about Ctrl-C."""
    return next((a for a in error.args if isinstance(a, int)), signal.SIGINT)


def _interrupted(arguments: Sequence[str], number: int | None) -> int:
    from matsmerge.cli.consoles import show_problems

    show_problems([f"interrupted{_how_to_continue(arguments)}"])
    return 128 + (number or signal.SIGINT)


def _how_to_continue(arguments: Sequence[str]) -> str:
    if list(arguments[:1]) == ["collect"] and any(a.startswith("--max-memory") for a in arguments):
        return "; collecting block by block begins again with the same command"
    match list(arguments[:2]):
        case ["merge" | "mergekit" | "collect" | "train" | "tune", *_]:
            return "; continue with --resume"
        case ["demo", *_] | ["experiment", "run" | "resume"]:
            return "; the same command continues"
    return ""


if __name__ == "__main__":
    main()
