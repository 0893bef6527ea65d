"""The tasks by their names."""

from jkvq.tasks.code.humaneval import HumanEval
from jkvq.tasks.longbench.longbench import LongBench
from jkvq.tasks.mathematics.tasks import Aime24, Gsm8k, Math500
from jkvq.tasks.mrcr import Mrcr
from jkvq.tasks.needle_grid import NeedleGrid
from jkvq.tasks.ruler.ruler import Ruler
from jkvq.tasks.task import Task

TASKS: dict[str, Task] = {
    "gsm8k": Gsm8k(),
    "math500": Math500(),
    "aime24": Aime24(),
    "humaneval": HumanEval(),
    "ruler": Ruler(),
    "niah": NeedleGrid(),
    "longbench": LongBench(),
    "mrcr": Mrcr(),
}
