"""Functions for users' tests: audit a loss function, compare steps with one tower."""

from towerjax.step.look.comparison import AuditReport as AuditReport
from towerjax.step.look.comparison import Finding as Finding
from towerjax.step.look.comparison import Refuted as Refuted
from towerjax.step.look.comparison import SplitError as SplitError
from towerjax.step.look.split import NotProved as NotProved
from towerjax.tools.testing.programs import ProgramReport as ProgramReport
from towerjax.tools.testing.programs import prove as prove
from towerjax.tools.testing.same import same_on_devices as same_on_devices
from towerjax.tools.testing.steps import assert_replicates as assert_replicates
from towerjax.tools.testing.steps import assert_same as assert_same
from towerjax.tools.testing.steps import one_tower as one_tower
