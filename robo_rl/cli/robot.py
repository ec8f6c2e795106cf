"""`robo_rl robot check FILE`: the checklist of a robot's first day, as a walk that writes what was answered."""

from robo_rl.errors import UserError
from robo_rl.experiment.robot_check import Question, RobotOptions, check_robot, read_answer

__all__ = ["RobotOptions", "run"]


def run(options: RobotOptions) -> int:
    """0: everything was checked and answered well; 1: something is open or says no."""
    return 0 if check_robot(options, ask, lambda line: print(line, flush=True)) else 1


def ask(question: Question) -> str:
    """Until the answer is one; the end of the input leaves the rest open."""
    while True:
        try:
            said = input(f"[{question.part}] {question.text} ({question.unit or 'y/n'}, Enter: later) ")
        except EOFError:
            return ""
        try:
            read_answer(question, said)
            return said
        except UserError as e:
            print(e)
