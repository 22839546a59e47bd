"""Functions for users' tests: audit a loss function, compare steps with one tower."""

from towerjax.check.comparison import AuditReport as AuditReport
from towerjax.check.comparison import Finding as Finding
from towerjax.check.comparison import Refuted as Refuted
from towerjax.check.comparison import SplitError as SplitError
from towerjax.check.equality.told import NotProved as NotProved
from towerjax.check.programs.processes import ProgramDied as ProgramDied
from towerjax.check.programs.programs import ProgramReport as ProgramReport
from towerjax.check.programs.programs import prove as prove
from towerjax.check.programs.same import same_for as same_for
from towerjax.check.programs.same import same_on_devices as same_on_devices
from towerjax.testing.given import copies as copies
from towerjax.testing.given import parts as parts
from towerjax.testing.given import placed as placed
from towerjax.testing.inner import inner as inner
from towerjax.testing.resumed import ResumedReport as ResumedReport
from towerjax.testing.resumed import same_resumed as same_resumed
from towerjax.testing.steps import assert_replicates as assert_replicates
from towerjax.testing.steps import assert_same as assert_same
from towerjax.testing.steps import one_tower as one_tower
