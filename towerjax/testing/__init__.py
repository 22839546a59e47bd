"""Functions for users' tests: audit a loss function, compare steps with one tower."""

from towerjax.check.equality.told import NotProved as NotProved
from towerjax.prover.comparison import AuditReport as AuditReport
from towerjax.prover.comparison import Finding as Finding
from towerjax.prover.comparison import Refuted as Refuted
from towerjax.prover.comparison import SplitError as SplitError
from towerjax.prover.programs.processes import ProgramDied as ProgramDied
from towerjax.prover.programs.programs import ProgramReport as ProgramReport
from towerjax.prover.programs.programs import prove as prove
from towerjax.prover.programs.same import same_for as same_for
from towerjax.prover.programs.same import same_on_devices as same_on_devices
from towerjax.testing.given import copies as copies
from towerjax.testing.given import parts as parts
from towerjax.testing.given import placed as placed
from towerjax.testing.inner import inner as inner
from towerjax.testing.resumed import ResumedReport as ResumedReport
from towerjax.testing.resumed import same_resumed as same_resumed
from towerjax.testing.steps import assert_replicates as assert_replicates
from towerjax.testing.steps import assert_same as assert_same
from towerjax.testing.steps import one_tower as one_tower
