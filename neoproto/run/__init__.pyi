from .compose import compose_run as compose_run
from .interactive import InteractiveTrainer as InteractiveTrainer
from .interactive import StepDone as StepDone
