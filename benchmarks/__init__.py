"""The scripts that measure the project's own figures.

An example is ``python -m benchmarks.overhead``.

* Gates are the files of this folder with a ``main``. Each prints a table, takes
  ``--json``, and has a small form, ``--small``, that CI runs. All are built on
  `benchmarks.harness`.
* `benchmarks.peers` has the same training by other libraries, for ``towerjax bench``.
* Figures that were measured once stand on the pages of evidence, with commands.
"""
