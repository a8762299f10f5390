"""One test for many files, in place of a test for each."""

import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


def of_each(files):
    """Turns a test of one file into one of all `files`, which names every file that fails."""

    def of_all(test):
        @functools.wraps(test)
        def test_all():
            failures = []
            for file in files:
                try:
                    test(file)
                except AssertionError as error:
                    failures.append(f"{file.relative_to(ROOT)}: {error}")
            assert files and not failures, "\n".join(failures)

        del test_all.__wrapped__  # whose parameter would be taken for a fixture
        return test_all

    return of_all
