"""What measures the project's own figures: ``python -m benchmarks.overhead``.

* Gates, the files of this folder with a ``main``: each has a table, ``--json``, and a
  small form, ``--small``, that CI runs. All are built on `benchmarks.harness`.
* `benchmarks.peers`: the same training by other libraries, for ``towerjax bench``.
* What was measured once stands in docs/evidence/, with its command.
"""
