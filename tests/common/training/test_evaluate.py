from medspeed.common.training.evaluate import doubts


def test_a_dice_that_proves_nothing_is_doubted_in_capitals():
    assert doubts(0.9, held_out=True) == []
    assert [each.split(":")[0] for each in doubts(0.9, held_out=False)] == ["NOT HELD OUT"]
    assert [each.split(":")[0] for each in doubts(0.0, held_out=True)] == ["NOTHING LEARNED"]
    assert [each.split(":")[0] for each in doubts(0.0, held_out=False)] == ["NOT HELD OUT", "NOTHING LEARNED"]
