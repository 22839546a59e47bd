"""What do the commands of ``towerjax`` share? Exit codes, errors, JSON."""

from towerjax.shell.codes import INTERRUPTED as INTERRUPTED
from towerjax.shell.codes import NOT_SO as NOT_SO
from towerjax.shell.codes import OK as OK
from towerjax.shell.codes import WRONG as WRONG
from towerjax.shell.command import Parser as Parser
from towerjax.shell.command import add_command as add_command
from towerjax.shell.command import finished as finished
from towerjax.shell.command import show as show
from towerjax.shell.numbers import as_json as as_json
