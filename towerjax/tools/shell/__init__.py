"""What do the commands of ``towerjax`` share? Exit codes, errors, JSON."""

from towerjax.loop.json_lines import as_json as as_json
from towerjax.tools.shell.codes import INTERRUPTED as INTERRUPTED
from towerjax.tools.shell.codes import NOT_SO as NOT_SO
from towerjax.tools.shell.codes import OK as OK
from towerjax.tools.shell.codes import WRONG as WRONG
from towerjax.tools.shell.command import Parser as Parser
from towerjax.tools.shell.command import add_command as add_command
from towerjax.tools.shell.command import finished as finished
from towerjax.tools.shell.command import show as show
