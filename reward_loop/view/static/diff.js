/** The difference of two texts, word by word. */

const MOST_EDITS = 1500;
const MOST_WORDS = 40_000;

/**
 * Returns the words of both texts as runs: `{text, isSame}`, for each text. Texts that differ in more than 1500 words
 * are compared only at their beginnings and ends.
 */
export function diff(a, b) {
  const [left, right] = [words(a), words(b)];
  const start = common(left, right, (list, i) => list[i]);
  const rest = Math.min(left.length, right.length) - start;
  const end = Math.min(
    rest,
    common(left, right, (list, i) => list[list.length - 1 - i]),
  );
  const [middleA, middleB] = [left.slice(start, left.length - end), right.slice(start, right.length - end)];
  const same = middleA.length + middleB.length > MOST_WORDS ? null : matches(middleA, middleB);
  const flags = (list, kept) => list.map((_, i) => i < start || i >= list.length - end || kept.has(i - start));
  const none = new Set();
  return [runs(left, flags(left, same?.a ?? none)), runs(right, flags(right, same?.b ?? none))];
}

function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

function common(a, b, at) {
  const length = Math.min(a.length, b.length);
  let i = 0;
  while (i < length && at(a, i) === at(b, i)) i += 1;
  return i;
}

/** Returns the indices of the words that both lists have in the same order (Myers' algorithm), or null. */
function matches(a, b) {
  const trace = [];
  const furthest = new Map([[1, 0]]);
  for (let edits = 0; edits <= Math.min(MOST_EDITS, a.length + b.length); edits += 1) {
    trace.push(new Map(furthest));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && furthest.get(k - 1) < furthest.get(k + 1));
      let x = down ? furthest.get(k + 1) : furthest.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      furthest.set(k, x);
      if (x >= a.length && x - k >= b.length) return walkBack(trace, a.length, b.length);
    }
  }
  return null;
}

function walkBack(trace, lengthA, lengthB) {
  const kept = { a: new Set(), b: new Set() };
  let [x, y] = [lengthA, lengthB];
  for (let edits = trace.length - 1; edits >= 0; edits -= 1) {
    const furthest = trace[edits];
    const k = x - y;
    const down = k === -edits || (k !== edits && furthest.get(k - 1) < furthest.get(k + 1));
    const before = down ? k + 1 : k - 1;
    const beforeX = edits === 0 ? 0 : furthest.get(before);
    const beforeY = edits === 0 ? 0 : beforeX - before;
    for (; x > beforeX && y > beforeY; x -= 1, y -= 1) {
      kept.a.add(x - 1);
      kept.b.add(y - 1);
    }
    [x, y] = [beforeX, beforeY];
  }
  return kept;
}

function runs(list, flags) {
  const found = [];
  list.forEach((text, i) => {
    if (found.at(-1)?.isSame === flags[i]) found.at(-1).text += text;
    else found.push({ text, isSame: flags[i] });
  });
  return found;
}
