import pytest

from jkvq.support.errors import UserError, nearest


def test_user_errors_pass_those_who_expect_damaged_input():
    with pytest.raises(UserError, match="a sentence"):
        try:
            raise UserError("a sentence")
        except (ValueError, TypeError, LookupError, ArithmeticError, OSError):
            pytest.fail("taken for an error of the parser")


def test_nearest_names_what_is_close_or_all():
    assert nearest("saw-int5", ["saw-int4", "bf16"]) == "did you mean saw-int4?"
    assert nearest("zzz", ["saw-int4", "bf16"]) == "known: saw-int4, bf16."
