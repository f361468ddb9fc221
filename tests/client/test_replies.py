"""Replies as judges write them, and the verdict that everybody reads in them; ``None`` if not all read the same."""

# ruff: noqa: E501 - a reply stays in one line

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from reward_loop.client import Choice, Json, NoVerdictError, Number, Pattern, Ratings, Verdict


class Grade(BaseModel):
    score: float


NUMBER = Number(1, 10)
HUNDRED = Number(0, 100)
CHOICE = Choice({"correct": 1, "incorrect": 0})
THREE = Choice({"correct": 1, "partially correct": 0.5, "incorrect": 0})
LETTER = Choice({"C": 1, "P": 0.5, "I": 0}, after="GRADE:")
SAME = Choice({"same": 1, "different": 0})
YES = Choice({"yes": 1, "no": 0})
BRACKETS = Choice({"A": 1, "B": 0, "tie": 0.5}, after="[[")
PREFERRED = Choice({"A": 1, "B": 0, "tie": 0.5}, after="Winner:")
BOXED = Number(1, 10, after="\\boxed{")
CHINESE = Number(1, 10, after="\u8bc4\u5206:")
JSON = Json(Grade)
RATINGS = Ratings({"correct": 2, "clear": 1})
PATTERN = Pattern(r"<verdict>(\w+)</verdict>", {"yes": 1, "no": 0})
DIGITS = Pattern(r"\[\[(\d+)\]\]")

REPLIES: list[tuple[Verdict, str, Any]] = [
    # The sentence that leads to the marker is about something else.
    *((NUMBER, text, None) for text in (
        "A perfect answer gets\nScore: 10", "A perfect answer gets Score: 10",
        "The answer has a gap. A flawless proof would receive:\nScore: 10",
        "Without the sign error it would have gotten\nScore: 9", "Otherwise, I would give it\nScore: 9",
        "Some graders would assign\nScore: 7", "The maximum is\nScore: 10", "Someone in a hurry would say\nScore: 9",
        "Such answers usually get\nScore: 4", "You want me to give\nScore: 10", "I am supposed to output\nScore: 10",
        "I almost gave\nScore: 9", "The other response gets\nScore: 4",
        "A teacher would write 'well done', and give\nScore: 9", "Une r\u00e9ponse parfaite obtient\nScore: 10",
        "\u5b8c\u7f8e\u7684\u56de\u7b54\u4f1a\u5f97\u5230\nScore: 10", "The best possible score is:\nScore: 10",
        "An expert would rate this a\nScore: 9", "In a perfect world this earns\nScore: 10",
        "A complete solution would be worth\nScore: 10", "With a proof, this would have been\nScore: 10",
        "What a great answer looks like:\nScore: 10", "Others have given\nScore: 9",
        "I was about to write\nScore: 9", "The student claims to deserve\nScore: 10",
        "It would otherwise be\nScore: 9", "Answers like these receive\nScore: 4",
        "Any answer with a sign error gets at most\nScore: 4", "Nobody would give this\nScore: 10",
        "For a wrong answer, output\nScore: 1", "Consider a perfect answer. It gets\nScore: 9",
        "Let's imagine a student who shows no work. They would get this:\nScore: 4",
        "Suppose that an essay has no title. It is worth:\n**Score: 9**", "Picture another proof. It earns Score: 9",
    )),
    # It is about this answer.
    *((NUMBER, text, 8) for text in (
        "This answer gets\nScore: 8", "The response deserves:\nScore: 8", "The final score is:\nScore: 8",
        "The answer is nearly perfect\nScore: 8", "A perfect answer would get 10. This one lacks units.\nScore: 8",
        "Consider the whole answer. It gets\nScore: 8", "Consider a perfect answer. This one lacks units and gets\nScore: 8",
        "Suppose a factor of 2 is lost. It cancels, so the result is right.\nScore: 8",
        "## Evaluation\nScore: 8", "Strengths:\n- clear\n- correct\nWeaknesses:\n- no example\nScore: 8",
        "As requested:\nScore: 8", "I checked if the sum is right, and it is.\nScore: 8",
        "\u56de\u7b54\u6b63\u786e\u3002\nScore: 8", "Conclusion: Score: 8",
        "In my opinion, the response merits\nScore: 8", "I'm giving this one\nScore: 8",
        "This response therefore gets:\nScore: 8",
        "The student shows good understanding and is nearly perfect.\nScore: 8",
        "According to the rubric, this answer earns\nScore: 8",
        "The answer would be better with an example.\n\nScore: 8", "---\nScore: 8",
        "Overall assessment: The answer is accurate and well organized\nScore: 8",
        "Step 3: give the score\nScore: 8", "Since the response answers the question, my score is:\nScore: 8",
        "It's a good answer\nScore: 8", "Without further ado:\nScore: 8",
        "This matches the reference answer\nScore: 8", "it is what it is\nScore: 8",
        "Here is my score for the answer\nScore: 8", "The reference answer is 7\nThe given answer is 7\nScore: 8",
    )),
    # It is an example, a template or a condition.
    *((NUMBER, text, None) for text in (
        "Example output:\nScore: 10", "### Example\nScore: 10", "Format:\n\nScore: 10",
        "If the answer is correct:\nScore: 10", "If it is right, write\nScore: 10\nIf it is wrong, write\nScore: 1",
        "Assuming the proof holds:\nScore: 10", "In case of a right answer:\nScore: 10", "For instance,\nScore: 10",
        "Template:\n```\nScore: 10\n```", "such as Score: 10", "Use the form Score: 10",
        "The last line should look like this:\nScore: 10", "According to the rubric, perfect work is:\nScore: 10",
        "Score: 10\nis what a perfect answer would get.", "Score: 10\nwould be too much.",
        "I can't score this. A top answer would be\nScore: 10", "In such cases graders tend to give\nScore: 5",
        "An answer with units would have earned Score: 10", "The author expects\nScore: 10", "Sample:\n\nScore: 10",
        "Imagine a perfect reply:\nScore: 10", "A typical reply looks like this:\n\n```\nScore: 8\n```",
        "You should reply with\nScore: 8", "Low-quality answers:\nScore: 2\n\nHigh-quality answers:\nScore: 9",
        "GPT-4's rating:\nScore: 9", "The gold label is\nScore: 9", "The first judge wrote:\nScore: 7",
        "The threshold is\nScore: 7", "Score: seven point 5", "Score: around eight",
    )),
    # Items of a list.
    *((NUMBER, text, None) for text in (
        "Score: 1 - useless\nScore: 5 - fair\nScore: 10 - perfect", "Score: 10 = perfect\nScore: 1 = useless",
        "- Score: 10: all right\n- Score: 5: some errors\n- Score: 1: all wrong",
        "Score: 10 for perfect answers.\nScore: 1 for useless ones.",
        "### Correctness\nScore: 8\n\n### Clarity\nScore: 6", "**Correctness**\nScore: 8\n\n**Clarity**\nScore: 6",
        "Correctness - Score: 8\nClarity - Score: 6\nStyle - Score: 9",
        "**Correctness**: Score: 8\n**Clarity**: Score: 6", "- Correctness: Score: 8/10\n- Clarity: Score: 6/10",
        "| Correctness | Score: 8 |\n| Clarity | Score: 6 |", "Answer A: Score: 7\nAnswer B: Score: 9",
        "Response 1:\nScore: 7\n\nResponse 2:\nScore: 9", "1. Correctness\n   Score: 8\n2. Clarity\n   Score: 6",
        "1. The result is right. Score: 8\n2. The style is poor. Score: 3",
        "Criterion 1 (accuracy): Score: 8. Good.\nCriterion 2 (style): Score: 4. Weak.",
        "Accuracy:\nScore: 8\nIt is right.\n\nStyle:\nScore: 4\nIt is dull.",
        "**Accuracy:** Score: 9\n**Depth:** Score: 5", "Model 1 -> Score: 4\nModel 2 -> Score: 8",
        "(a) Score: 9 for accuracy\n(b) Score: 4 for depth", "First criterion: Score: 9\nSecond criterion: Score: 4",
        "Score: 9 (accuracy)\nScore: 4 (depth)", "Score: 10 \u2192 excellent\nScore: 5 \u2192 fair",
        "Score: 1: bad\nScore: 10: great",
        "### Response A\nGood.\n\nScore: 7\n\n### Response B\nBetter.\n\nScore: 9",
        "**Grammar**\n\n- Score: 9\n\n**Content**\n\n- Score: 5", "Score: 9 on accuracy\nScore: 4 on depth",
    )),
    # A list beside a verdict.
    *((NUMBER, text, 8) for text in (
        "Score: 1 - useless\nScore: 10 - perfect\n\nThe answer is good but short.\nScore: 8",
        "### Correctness\nScore: 9\n\n### Clarity\nScore: 6\n\n### Overall\nScore: 8",
        "Correctness - Score: 9\nClarity - Score: 6\nOverall - Score: 8",
        "- Correctness: Score: 9\n- Clarity: Score: 6\n\nScore: 8",
        "| Correctness | Score: 9 |\n| Clarity | Score: 6 |\n| **Overall** | **Score: 8** |",
        "- Correctness: 9/10\n- Clarity: 7/10\n\nScore: 8", "Score: 8\n- Correctness: 9\n- Clarity: 7",
        "### First impression\nScore: 5\n\n### Final verdict\nScore: 8",
        "Correctness: 9\nClarity: 7\n**Final Score: 8**", "**Correctness**: Score: 8\n**Clarity**: Score: 8",
        "Rubric: 1 is useless, 10 is perfect.\nScore: 8",
        "| Criterion | Points |\n|---|---|\n| Accuracy | 9 |\n| Style | 6 |\n\nScore: 8",
        "Total: 4 + 4 = 8\nScore: 8",
        "1. Accuracy: 9\n2. Style: 6\n3. Depth: 9\n\nAverage: (9 + 6 + 9) / 3 = 8\n\nScore: 8/10",
        "Accuracy: 9/10, depth: 7/10.\nScore: 8", "### Response\nGood.\n\n### Score\nScore: 8",
        "Draft: Score: 6\nFinal: Score: 8", "Initial thoughts: Score: 6, but then I saw the proof.\n\nScore: 8",
        "1. Accuracy: good\n2. Depth: fair\n3. Score: 8", "- **Accuracy**: good\n- **Score: 8**",
        "Strengths: clear.\nWeaknesses: none.\nScore: 8", "Score: 8\nScore breakdown: accuracy 9, depth 7",
        "| Accuracy | 9 |\n| Depth | 7 |\n| Score: | 8 |", "Score (1-10): good\nScore: 8",
    )),
    # Numbers as words.
    *((NUMBER, text, 8) for text in (
        "Score: eight", "**Score:** Eight.", "Score: eight out of ten", "Score: 8 out of ten", "Score: eight (8)",
        "Score: 8 (eight)", "Score: 8\nScore: eight",
        "Score: 3 at first.\nThen I checked the proof, and it holds.\nScore: eight", "Score: eight/10",
        "Score: eight - the proof is short", "Score: eight, one step is missing", "Score: 8, one step is missing",
    )),
    *((NUMBER, text, 10) for text in (
        "Score: ten",
    )),
    *((NUMBER, text, None) for text in (
        "Score: seven or eight", "Score: seven to eight", "Score: eight and a half", "Score: eight point five",
        "Score: eight, nine", "Score: eighty", "Score: eighteen", "Score: seven-eight", "Score: eight\nScore: three",
        "Score: eight\nThe score is three.", "Score: zero", "Score: one of the best answers", "Score: eight hundred",
        "Score: 8 or nine", "Score: 8 (nine if lenient)", "Score: twenty-eight", "Score: 8\nOverall: three",
        "Score: eleven", "Score: eight out of twenty", "Score: eight thirds",
    )),
    *((NUMBER, text, 1) for text in (
        "Score: one",
    )),
    # What qualifies or contradicts the word.
    *((CHOICE, text, None) for text in (
        "Verdict: correct, wrong", "Verdict: correct in principle", "Verdict: correct aside from the sign",
        "Verdict: correct under the assumption that x > 0", "Verdict: correct method",
        "Verdict: correct, only the sign is wrong", "Verdict: correct, yet incomplete", "Verdict: correct-looking",
        "Verdict: correct half of the time", "Verdict: correct / wrong", "Verdict: correct, nearly",
        "Verdict: correct, sort of", "Verdict: correct as an approximation", "Verdict: correct, not fully",
        "Verdict: correct but for the sign", "Verdict: correct, sign wrong", "Verdict: correct, conditionally",
        "Verdict: correct, in essence", "Verdict: correct insofar as x > 0", "Verdict: correct for x > 0 only",
        "Verdict: correct (with a caveat)", "Verdict: correct; partially", "Verdict: correct => wrong",
        "Verdict: correct for part a", "Verdict: correct format", "Verdict: correct (unverified)",
        "Verdict: correct, does not match",
    )),
    # What does not.
    *((CHOICE, text, 'correct') for text in (
        "Verdict: correct and complete", "Verdict: correct according to the reference",
        "Verdict: correct, nothing is wrong", "Verdict: correct overall", "Verdict: correct, with all steps shown",
        "Verdict: correct in full", "Verdict: correct, both values match", "Verdict: It is correct.",
        "Verdict: correct for all x", "Verdict: correct, 7 is right", "Verdict: correct without doubt",
        "Verdict: correct, as the final value is 7", "Verdict: correct and clear",
        "Verdict: correct - the final answer of 7 is equal to the reference", "Verdict: correct: 7",
        "Verdict: correct. The answer is not wrong in any way.", "Verdict: correct, it matches",
        "Verdict: correct, both are equal", "Verdict: correct\n\nThe final answer matches the reference.",
        "Verdict: correct, well done", "Verdict: CORRECT \u2714", "Verdict: The final answer is correct.",
        "Reference: 7. Answer: 7.\nVerdict: Correct", "Comparing both: 0.5 = 1/2.\n\n**Verdict:** correct",
        "Verdict: **CORRECT** \u2705", "It is not incorrect.\nVerdict: correct", "$$x=7$$\nVerdict: correct",
    )),
    # A word with the lowest score.
    *((CHOICE, text, 'incorrect') for text in (
        "Verdict: incorrect, wrong sign", "Verdict: incorrect - the answer is not correct",
        "Verdict: incorrect (wrong)", "Verdict: incorrect, false", "Verdict: Incorrect. The right value is 7.",
        "Verdict: incorrect (not correct)", "Verdict: incorrect because the sign is wrong",
        "Verdict: incorrect, since step 2 is invalid", "Verdict: The answer is incorrect.",
        "Verdict: incorrect - wrong units", "Verdict: incorrect due to a sign error", "Verdict: incorrect answer",
        "Verdict: incorrect, it should be 7", "Verdict: incorrect as the sign is wrong",
        "Verdict: incorrect, as the final value is 8", "Verdict: incorrect, the sign is wrong",
        "Verdict: incorrect; expected 7", "Verdict: incorrect: 8 \u2260 7",
        "Verdict: Incorrect \u2014 the reference is 7", "Verdict: incorrect, the right answer is 7",
        "Verdict: incorrect. The answer is not correct.", "Verdict: incorrect, since the correct answer is 7",
        "Verdict: incorrect and incomplete", "Verdict: incorrect. While the method is correct, the value is wrong.",
        "Verdict: incorrect, does not match", "Verdict: incorrect (8 instead of 7)", "Verdict: incorrect, wrong",
        "Verdict: incorrect, the value differs", "Verdict: INCORRECT \u274c",
        "Verdict: incorrect, the answer should be 7",
    )),
    # A flaw of how an answer is written does not qualify what it is.
    *((CHOICE, text, 'correct') for text in (
        "Verdict: correct, but the explanation could be clearer", "Verdict: correct, although the wording is a bit long.",
        "Verdict: **correct** (but its notation could be more precise)",
    )),
    *((CHOICE, text, None) for text in (
        "Verdict: correct, but the explanation could be clearer and the value is wrong",
        "Verdict: correct, but the answer could be better", "Verdict: correct, but the explanation is wrong",
    )),
    # A word with the lowest score that is qualified.
    *((CHOICE, text, None) for text in (
        "Verdict: incorrect, right", "Verdict: incorrect (correct)", "Verdict: incorrect only in part",
        "Verdict: incorrect in notation only", "Verdict: incorrect, but right in spirit", "Verdict: incorrect sign",
        "Verdict: incorrect, valid",
    )),
    # A word between the lowest and the highest score.
    *((THREE, text, 'partially correct') for text in (
        "Verdict: partially correct", "Verdict: Partially correct - the method is right, the value is wrong",
    )),
    *((THREE, text, None) for text in (
        "Verdict: correct, in part", "Verdict: partially correct or incorrect",
        "Verdict: correct (partially correct)",
    )),
    # Letters, whose scores say what they mean.
    *((LETTER, text, None) for text in (
        "GRADE: C (incorrect)", "GRADE: C, wrong", "GRADE: I (correct)", "A perfect answer gets\nGRADE: C",
        "GRADE: C for effort", "GRADE: A", "GRADE: I think it is C", "If it matched I would write\nGRADE: C",
    )),
    *((LETTER, text, 'I') for text in (
        "GRADE: I (incorrect)", "GRADE: I, the sign is wrong", "GRADE: I. Incorrect, since 8 is not 7.",
    )),
    *((LETTER, text, 'C') for text in (
        "GRADE: C (correct)", "GRADE: C - correct", "GRADE: C\nI am confident.", "GRADE: C. Correct.",
        "GRADE: C because it matches", "GRADE: C\n\nExplanation: the answer is right.", "**GRADE: C**",
        "GRADE: C (Correct)",
    )),
    *((LETTER, text, 'P') for text in (
        "GRADE: P (partially correct)",
    )),
    # Other words.
    *((SAME, text, None) for text in (
        "Verdict: same, different units", "Verdict: same only in part", "Verdict: same value",
        "Verdict: same, unequal", "Verdict: The answers are the same.", "Verdict: different in sign",
        "Verdict: same in value", "Verdict: same, though the notation differs",
    )),
    *((SAME, text, 'same') for text in (
        "Verdict: same", "Verdict: same (both are 7)", "Verdict: same meaning", "Verdict: same, 0.5 = 1/2",
        "Verdict: same - identical values", "Verdict: same, not different",
    )),
    *((SAME, text, 'different') for text in (
        "Verdict: different, not the same", "Verdict: different, 7 is not 8",
    )),
    *((YES, text, 'yes') for text in (
        "Verdict: Yes, the answer is correct.", "Verdict: Yes - it is right",
    )),
    *((YES, text, None) for text in (
        "Verdict: yes and no", "Verdict: yes, partly", "Verdict: no, but close", "Verdict: yes, no",
        "Verdict: no error", "Verdict: no doubt", "Verdict: no idea", "Verdict: no verdict",
    )),
    *((YES, text, 'no') for text in (
        "Verdict: No. The value is wrong.", "Verdict: no, the answer does not match",
    )),
    # Objects, matches and brackets.
    *((JSON, text, None) for text in (
        '{"score": 8}\nScore: 3', '{"score": 8}\n\n**Final score: 3**', '{"score": 8}\nThe score is 3.',
        'Score: 3\n{"score": 8}', '{"score": 8}\nRating: 3/10', '```json\n{"score": 8}\n```\nOverall score = 3',
        '{"score": 8}\nScore: three', 'A perfect answer gets\n{"score": 10}', 'For example:\n{"score": 10}',
        'If it is right:\n```json\n{"score": 10}\n```', 'Answer A: {"score": 7}\nAnswer B: {"score": 9}',
        '### Clarity\n{"score": 7}\n### Style\n{"score": 9}', '{"score": 8}\nI changed my mind: 3.',
        '{"score": 8}\n**Score:** 3', '{"score": 8}\n\nSo my rating is 3.', '{"score": 8}\nGrade: 3',
        '{"score": 8}\n- Score: 3', 'My score is 3.\n\n{"score": 8}', '{"score": 8}\nI would lower it to 3.',
        '{"score": 8}\nThe score should be 3.', 'A full answer would be\n{"score": 10}',
    )),
    *((JSON, text, {'score': 8}) for text in (
        '{"score": 8}\nScore: eight', '{"score": 8}\nsub-score: 3', '{"score": 8}\nStyle score: 3',
        '{"score": 8}\nTo get a score of 10, add a proof.', '{"score": 8}\nA score of 10 needs a proof.',
        '{"score": 8}\nMark 3 errors in red.', 'Rating: 8\n```json\n{"score": 8}\n```',
        '{"score": 8}\nScore range: 1 to 10',
        '```json\n{"score": 8}\n```\n\n**Explanation**: The answer got 8 because 2 steps are missing.',
    )),
    *((JSON, text, {'score': 8}) for text in (
        '{"score": 8}\nScore: 8', '{"score": 8}\nScore: 8/10', 'Score: 8\n{"score": 8}',
        '{"score": 8}\n\nThe score is 8 because it is short.',
        'Here is my evaluation:\n```json\n{"score": 8}\n```\nThe answer lacks 2 steps.',
        'At first I thought of a score of 3, but it is better:\n{"score": 8}',
        '{"score": 8}\nThe maximum score is 10.', '{"score": 8}\nVerdict: good', 'I would give\n{"score": 8}',
        '{"score": 8}\nScore explained: 3 steps are right.',
    )),
    *((RATINGS, text, None) for text in (
        '{"correct": 10, "clear": 10}\nCorrect: 3', '{"correct": 10, "clear": 10}\nclear = 3',
    )),
    *((RATINGS, text, {'correct': 1, 'clear': 1}) for text in (
        '{"correct": 10, "clear": 10}\nCorrect: 10, clear: 10',
    )),
    *((RATINGS, text, {'correct': 1, 'clear': 0}) for text in (
        '{"correct": 10, "clear": 1}\nOverall score: 7',
    )),
    *((PATTERN, text, None) for text in (
        "<verdict>yes</verdict>\nVerdict: no", "A human would say\n<verdict>yes</verdict>",
        "<verdict>yes</verdict>\nThe final verdict is no.", "For example:\n<verdict>yes</verdict>",
    )),
    *((PATTERN, text, 'yes') for text in (
        "<verdict>yes</verdict>\nVerdict: yes", "I say\n<verdict>yes</verdict>",
        "<verdict>yes</verdict>\nNo errors were found.",
    )),
    *((DIGITS, text, None) for text in (
        "[[8]]\nScore: 3", "A perfect answer gets [[10]]",
    )),
    *((DIGITS, text, '8') for text in (
        "[[8]]\nRating: 8", "The rating is [[8]]", "Rating: [[8]]\nIt has 3 steps.",
    )),
    *((BRACKETS, text, None) for text in (
        "A human would choose\n[[A]]", "For example: [[A]]", "If the first is right:\n[[A]]",
        "Many users would prefer [[B]]", "Assistant A gets [[A]]",
    )),
    *((BRACKETS, text, 'A') for text in (
        "My choice:\n[[A]]", "Answer A is better: [[A]]", "The better answer is [[A]].",
        "Overall, the first answer is better.\n\n[[A]]", "The winner is [[A]]",
    )),
    *((BRACKETS, text, 'B') for text in (
        "I pick [[B]]", "[[A]]\n\nFinal verdict: [[B]]",
    )),
    # Names before the marker.
    *((NUMBER, text, None) for text in (
        "Perfect score: 10", "Ideal score: 10", "Preliminary score: 8", "Tentative score: 8", "Baseline score: 5",
        "Perhaps a Score: 8", "My guess is Score: 8", "Target score: 9", "Human score: 9", "Reference score: 10",
        "Lowest score: 1", "Highest score: 10", "Tentatively: Score: 8", "Suggested score: 8?", "Original score: 7",
        "Rough Score: 8", "Provisional Score: 8",
    )),
    *((NUMBER, text, 8) for text in (
        "Overall Score: 8", "Quality score: 8", "Average score: 8", "Helpfulness Score: 8", "Total Score: 8/10",
        "**My Final Score**: 8/10", "Weighted score: 8", "Verdict - Score: 8",
    )),
    # Text after the verdict.
    *((NUMBER, text, None) for text in (
        "Score: 8\nHowever, upon reconsideration, I would give it a 6.", "Score: 8\nUpon reflection, 6 is fairer.",
        "Score: 8\nOn second look, the proof has a gap: 6.", "Score: 8\nAfter reconsidering, I settle on 6.",
        "Score: 8\nI'd lower this to 6.", "Score: 8\nI'm changing it to 6.", "Score: 8\nChanging my score to 6.",
        "Score: 8\nLet me correct that: 6.", "Score: 8\n(Adjusted to 6.)", "Score: 8\n**Adjusted Score:** 6",
        "Score: 8\nNo wait, 6.", "Score: 8\nEdit: 6", "Score: 8\nScore (revised): 6", "Score: 8\nMake it 6.",
        "Score: 8\nThat said, a 6 would be fairer.", "Score: 8\nScratch that. 6.",
        "Score: 8\nOn further thought, 6.", "Score: 8\nMy actual score is 6.", "Score: 8\nI now believe 6 is right.",
        "Score: 8\nThat should be a 6.", "Score: 8\n-> 6", "Score: 8\nHold on, the sign is wrong.",
        "Score: 8\nNo, 6.", "Score: 8\n...no, 6 is better.", "Score: 8\nHmm, maybe 6.", "Score: 8\nScore: 6",
        "Score: 8\nUpdate: 6", "Score: 8\nCorrection, 6.", "Score: 8\nThe correct score is 6.",
        "Score: 8\nI take that back: 6.",
    )),
    *((NUMBER, text, 8) for text in (
        "Score: 8\nThe score reflects that 2 of 3 parts are right.",
        "Score: 8\nAfter checking again, everything holds.", "Score: 8\nI considered 7, but the proof is complete.",
        "Score: 8\nLet me know if you need more.", "Score: 8\nThe answer could be improved by adding 2 examples.",
        "Score: 8\nJustification: the response is clear.", "Score: 8\nUpon review, all steps are right.",
        "Score: 8\nReason: 3 steps are missing.", "Score: 8\nHowever, it lacks depth.",
        "Score: 8\nA higher score would need a proof.", "Score: 8\nIt lost 2 points for style.",
        "Score: 8\nA 10 would require an example.", "Score: 8\n---\nThis concludes my evaluation.",
        "Score: 8\nThank you!", "Score: 8\nConfidence: high", "Score: 8\nOn the whole, a good answer.",
        "Score: 8\nThe answer is good on balance.", "Score: 8\nImprovements: add 2 steps.",
        "Score: 8\n1. The proof is right.\n2. The style is good.", "Score: 8\nNote: the answer has 3 parts.",
        "Score: 8\nIt is better than most.", "Score: 8\nThe reference has 4 steps, the answer 6.",
        "Score: 8\nCorrect: 2 of 3 parts.", "Score: 8\nScores of 9 and above need a proof.",
        "Score: 8\nIn short: good.", "Score: 8\nThe answer gets full marks for 3 parts.",
        "Score: 8\n- 2 steps are right\n- 1 step is missing", "Score: 8\nMax: 10", "Score: 8\n(out of 10)",
        "Score: 8\nScale: 1-10",
    )),
    # Markup and languages.
    *((NUMBER, text, 8) for text in (
        "$\\boxed{\\text{Score: 8}}$", "\\boxed{Score: 8}", "**Score: 8/10** \u2b50",
        "Score\uff1a8\uff0c\u56de\u7b54\u5f88\u597d\u3002",
        "Score\uff1a8\uff0c\u56e0\u4e3a\u63a8\u7406\u6b63\u786e\u3002", "Score: 8\u5206", "Score: 8/10\u5206\u3002",
        "> Score: 8", "<score>Score: 8</score>", "Score: 8 \u2014 Tr\u00e8s bonne r\u00e9ponse.", "Score: 8 Punkte",
        "Score: 8. Die Antwort ist gut.", "Score: 8\u3001\u826f\u3044", "### **Score: 8**", "*Score:* 8 / 10",
        "Score: `8/10`", "| Score: 8/10 |", "Score: **8** (strong answer)", "Score: 8 (strong, clear)",
        "__Score:__ __8__", "Score: 8\n\n</evaluation>", "***Score: 8***", "Score: 8 / 10 \u2013 solid",
        "Score: 8 because the answer is right", "Score: 8.0/10.0", "Score: 8/10 (very good)", "[Score: 8]",
        "Score: [8/10]", "<think>Score: 3?</think>\n\nScore: 8", "Score: 8\ud83c\udf89",
    )),
    *((NUMBER, text, None) for text in (
        "Score: 8\u5206\u5de6\u53f3", "Score\uff1a8\uff0c\u4e5f\u8bb8\u66f4\u4f4e\u3002", "Score: 8 ou 9",
        "Score: 8 oder 9", "Score: 8\uff5e9", "Score: 8\u81f39", "Score: 8 bis 9", "Score: etwa 8", "Score: \u7ea68",
        "Score: 8\u70b9\u51e0", "Score: 8\u5206\u949f", "Score: \\frac{8}{9}", "Score: 8 \\pm 1",
        "Score: \\boxed{8} or \\boxed{7}", "Score: 8 (peut-\u00eatre moins)", "Score: 8, vielleicht weniger",
        "Score: \u2605\u2605\u2605\u2605", "Score: 8 \u2192 6", "Score: ~~8~~",
    )),
    *((HUNDRED, text, 85) for text in (
        "Score: 85", "Score: 85/100", "Score: 85 out of 100.",
    )),
    *((HUNDRED, text, None) for text in (
        "Score: 85%", "Score: eighty-five", "Score: ten out of one hundred",
    )),
    *((HUNDRED, text, 10) for text in (
        "Score: ten",
    )),
    # Whole replies.
    *((NUMBER, text, 8) for text in (
        "The response accurately explains photosynthesis, covering light reactions and the Calvin cycle. It could mention C4 plants. Therefore, it deserves a high rating.\n\nScore: 8",
        "## Evaluation\n\n### Strengths\n1. Clear structure\n2. Good examples\n\n### Weaknesses\n1. No sources\n\n### Score: 8",
        "The answer is helpful and accurate; if it had included an example, it would be a 9.\n\nScore: 8",
        "The essay has a clear thesis. The reference answer is more detailed, though. Overall, a good piece of work.\nScore: 8",
        "Score: 8\n\nReasoning: The assistant's answer addresses the question directly. However, the second paragraph is redundant.",
        "Pros:\n* fast\n* simple\n\nCons:\n* no tests\n\nFinal score: 8/10", "Good job! Score: 8/10",
        "The answer gets the main point across but fails to mention what happens when x is 0.\nScore: 8",
        "My rating of this answer, on a scale of 1 to 10, is: \n\nScore: 8",
        "The response meets the criterion well. It explains why the sky is blue as requested.\nScore: 8",
        "I rate it highly, since it says what a human would say.\nScore: 8",
        "The student got the right result; an ideal answer would also explain why.\nScore: 8",
        "The tone is what you'd expect from a teacher.\nScore: 8",
        "The answer satisfies the constraint in every paragraph\n\nScore: 8 (out of 10)",
        "Rating explanation: it is clear.\nScore: 8", "La r\u00e9ponse est correcte mais trop courte.\nScore: 8",
        "\u56de\u7b54\u306f\u6b63\u78ba\u3067\u3059\u3002\nScore: 8", 'The answer: "42". It is right.\nScore: 8',
        "Since $x = 3$, the solution holds.\nScore: 8", "- good: yes\n- score below\nScore: 8",
        "One sentence: The answer is good.\nScore: 8", "The response is in the format that was asked for.\nScore: 8",
        "It gives an example\nScore: 8", "For example, it explains the tides.\nScore: 8",
        "As it stands, the answer is\nScore: 8", "Score: 8 (clear; one small gap)", "Score: 8 points",
        "Score: 8 because it is clear", "Score: 8, good", "Score: 8 :)",
    )),
    # A remark after the verdict, as judges write it.
    *((NUMBER, text, 8) for text in (
        "Score: 8, which is good.", "Score: 8 \u2013 solid answer, minor issues in step 2.", "Score: 8 (mostly correct)",
        "Score: 8/10 - Good answer overall, but could use 1 more example.", "Score: 8 (2 minor errors)",
        "Score: 8, but the formatting could be improved.", "Score: 8, however the tone is a bit informal.",
        "Score: 8, 4 of 5 facts are right", "Score: 8 (nearly perfect)", "Score: 8 - errors in steps 2 and 3",
        "Score: 8\n\nA score of 10 would require a proof.", "Score: 8\nTo earn it a score of 10 needs a proof.", "Score: 8 (above average)", "Score: 8 von 10", "Score: 8 sur 10", "Score: 8 de 10", "Score: 8 \u0438\u0437 10",
        "Score: 8\uff08\u6ee1\u520610\u5206\uff09", "In the requested format:\n\nScore: 8",
    )),
    *((NUMBER, text, None) for text in (
        "Score: 8, which is high", "Score: 8, which is good for a draft", "Score: 8, step 2: 6", "Score: 8 for part 1 and 6 for part 2", "Score: 8 (part 1)",
        "Score: 8 in part 1, 6 in part 2", "Score: 8, step 2 = 6",
        "Score: 8, 2 errors, so 6", "Score: 10 - 2 errors", "Score: 8, but it could be lower", "Score: 8, mostly",
        "Score: 8, but it is provisional", "Score: 8, but the rubric says 6", "Score: 8, but it is closer to seven",
        "Score: 10 (partially correct)", "Score: 8 half", "Score: 8 errors", "Score: 3 steps are wrong", "Score: 8\nA score of 6 would be fairer.",
        "Score: 8\nA score of 6 is right.", "Score: 8 von 100", "Score: 8\uff08\u6ee1\u5206100\u5206\uff09",
        "In the following format:\n\nScore: 8", "Answer in the required format:\nScore: 8",
    )),
    *((CHOICE, text, "incorrect") for text in (
        "Verdict: incorrect, although the method is correct.", "Verdict: incorrect, but the method is sound.",
        "Verdict: incorrect as 7 \u2260 12.", "Verdict: incorrect \u2013 not equal.",
    )),
    *((CHOICE, text, None) for text in (
        "Verdict: incorrect, but the method is correct, so correct", "Verdict: correct \u2013 not equal",
        "Verdict: incorrect, although the final answer is correct", "Verdict: correct with high error",
        "Verdict: correct is better", "Verdict: correct per the rubric only", "Verdict: correct per the reference but wrong",
    )),
    *((CHOICE, text, "correct") for text in (
        "Verdict: correct with high confidence.", "Verdict: correct per the reference answer.",
    )),
    (CHOICE, "Verdict: incorrect (no final answer)", "incorrect"),
    (YES, "Verdict: yes, the notation is the same.", "yes"), (YES, "Verdict: yes, it is not right.", None),
    (YES, "Verdict: yes, there is no contradiction.", "yes"),
    *((PREFERRED, text, "A") for text in (
        "Winner: Response A", "Winner: Assistant A", "Winner: A is better.", "Winner: A is better than B.",
        "Winner: A wins.", "Winner: A is the better response, since B is wrong.",
    )),
    *((PREFERRED, text, None) for text in (
        "Winner: Response A or B", "Winner: A is better in style", "Winner: A is better than B, but B wins",
        "Winner: A is worse", "Winner: A is better, B wins", "Winner: Model A fails", "Winner: A is better?", "Winner: Answer a question",
    )),
    *((JSON, text, {"score": 8}) for text in (
        'Final output:\n```json\n{"score": 8}\n```', '**JSON output:**\n```json\n{"score": 8}\n```',
        'In the requested JSON format:\n{"score": 8}',
    )),
    (BOXED, "Score: \\boxed{8}/10", 8),
    (BOXED, "Score: \\boxed{8}/20", None),
    (CHINESE, "\u7efc\u5408\u8bc4\u5206\uff1a8\u5206\u3002", 8),
]  # fmt: skip


@pytest.mark.parametrize(("verdict", "reply", "expected"), REPLIES)
def test_a_reply_has_the_verdict_that_everybody_reads_in_it(verdict: Verdict, reply: str, expected: Any) -> None:
    try:
        found = verdict.read(reply)[0]
    except NoVerdictError:
        found = None
    assert found == expected
