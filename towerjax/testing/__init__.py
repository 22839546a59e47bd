"""Is your own code right on any number of towers? For tests of your own."""

from towerjax.testing.compare import assert_same as assert_same
from towerjax.testing.findings import AuditReport as AuditReport
from towerjax.testing.findings import Finding as Finding
from towerjax.testing.findings import SplitError as SplitError
from towerjax.testing.oracle import one_tower as one_tower
from towerjax.testing.replicates import assert_replicates as assert_replicates
