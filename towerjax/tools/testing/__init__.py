"""Is your own code right on any number of towers? For tests of your own."""

from towerjax.step.amiss import check_mirrored as check_mirrored
from towerjax.tools.testing.audit import AuditReport as AuditReport
from towerjax.tools.testing.audit import Finding as Finding
from towerjax.tools.testing.audit import SplitError as SplitError
from towerjax.tools.testing.audit import assert_replicates as assert_replicates
from towerjax.tools.testing.compare import assert_same as assert_same
from towerjax.tools.testing.compare import one_tower as one_tower
