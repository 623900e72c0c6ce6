"""Make the synthetic data set, as `rdvit prepare phantom OUT` does: python data_prep/make_phantom.py OUT."""

from __future__ import annotations

import argparse
import sys

from rdvit.data.phantom import write_phantom
from rdvit.errors import RdvitError


def main() -> None:
    """Parse the command line and write the phantom; wrong input exits with 2."""
    parser = argparse.ArgumentParser(description="Write synthetic beating hearts as an ACDC folder.")
    parser.add_argument("out", help="folder to make")
    parser.add_argument("--patients", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the set (default: %(default)s)")
    parser.add_argument("--cines", type=int, default=2, help="so many patients get a 4D cine (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier phantom")
    options = parser.parse_args()
    try:
        out = write_phantom(options.out, options.patients, options.seed, cines=options.cines, overwrite=options.overwrite)
    except RdvitError as error:
        parser.error(str(error))
    print(f"{out}: {options.patients} patients", file=sys.stderr)


if __name__ == "__main__":
    main()
