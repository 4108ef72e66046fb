import { expect, test } from "vitest";
import { Failed } from "../../packages/holdfast/src/batch/coalesce.ts";
import { type Repeats, foldRepeats } from "../../packages/holdfast/src/batch/repeats.ts";

interface Call {
  readonly id?: string;
  readonly what: string;
}
const repeats: Repeats<Call, string> = {
  id: ({ id }) => id,
  same: (one, other) => one.what === other.what,
  replayed: (answer) => `${answer} before`,
};

/** What is sent together, and what comes after it, in this order. */
async function fold(calls: readonly Call[], answerOf = ({ what }: Call): string | Failed => what) {
  const sent: string[] = [];
  const answers = await foldRepeats(
    repeats,
    calls,
    async (some) => {
      sent.push(some.map(({ what }) => what).join("+"));
      return some.map(answerOf);
    },
    async (one) => {
      sent.push(`then ${one.what}`);
      return `after ${one.what}`;
    },
  );
  return { sent, answers };
}

test("the same id with the same content is sent once, and told to be a replay", async () => {
  const { sent, answers } = await fold([
    { id: "1", what: "a" },
    { id: "2", what: "b" },
    { id: "1", what: "a" },
    { id: "1", what: "a" },
  ]);
  expect(sent).toEqual(["a+b"]);
  expect(answers).toEqual(["a", "b", "a before", "a before"]);
});

test("the same id with other content comes after the batch, in order", async () => {
  const { sent, answers } = await fold([
    { id: "1", what: "a" },
    { id: "1", what: "b" },
    { id: "1", what: "c" },
    { id: "1", what: "a" },
  ]);
  expect(sent).toEqual(["a", "then b", "then c"]);
  expect(answers).toEqual(["a", "after b", "after c", "a before"]);
});

test("calls without an id are never taken for one another", async () => {
  const { sent, answers } = await fold([{ what: "a" }, { what: "a" }]);
  expect(sent).toEqual(["a+a"]);
  expect(answers).toEqual(["a", "a"]);
});

test("the error of the first is that of those who ask for the same", async () => {
  const failed = new Failed(new Error("no"));
  const { answers } = await fold(
    [
      { id: "1", what: "a" },
      { id: "1", what: "a" },
    ],
    () => failed,
  );
  expect(answers).toEqual([failed, failed]);
});
