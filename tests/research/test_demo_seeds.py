from research.demo import page


def test_the_page_counts_equal_sentences():
    def entry(alive: int, sentence: str) -> dict[str, object]:
        counts = {"none": [0, 8], "start:cs:0.7": [alive, 8], "unit gain": [7, 8]}
        return {"survivors": counts, "sentence": sentence}

    text = page({"10": entry(8, "More with CS."), "9": entry(6, "More with CS."), "11": entry(3, "No difference.")})
    assert [line.split()[0] for line in text.splitlines() if "of 8" in line] == ["9", "10", "11"]
    assert "6 of 8" in text
    assert text.endswith("2 of 3 base seeds: More with CS.\n1 of 3 base seeds: No difference.")
