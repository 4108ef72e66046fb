/** What a batch of uses knows by its ids. */
import { expect, test } from "vitest";
import { decideUses } from "../../../packages/holdfast/src/quota/decide/consume.ts";
import type { BucketRow, LineRow } from "../../../packages/holdfast/src/quota/decide/rows.ts";

const now = 1_000_000;
const bucket = { quota: "q", subject: "ann" };
const definitions = [{ rule: { window: "none" }, over: 0, plans: undefined }] as const;

const row = (of: { quota: string; subject: string }, set: Partial<BucketRow>): BucketRow => ({
  id: 1,
  ...of,
  used: 0,
  held: 0,
  credit: 0,
  version: 0,
  reset: 0,
  since: undefined,
  parts: undefined,
  own_limit: undefined,
  plan: undefined,
  rolled: undefined,
  moves: undefined,
  moved_to: undefined,
  moved_from: undefined,
  ...set,
});

test("a hold whose entry was rolled up, used for something else, is a conflict, whether there is room or not", () => {
  const held = row(bucket, { held: 5, version: 9, rolled: 9 });
  const holds = [{ ...bucket, id: "x", amount: 5, until: 2_000_000 }];
  const use = { bucket: 0, id: "x", amount: 5, details: undefined };
  for (const limit of [5, 50]) {
    const decided = decideUses(
      { now, buckets: [{ row: held, lines: new Map(), holds, grants: [] }] },
      {
        definitions,
        buckets: [{ ...bucket, definition: 0, limit }],
        uses: [
          { ...use, group: 0, holdMs: 1000 },
          { ...use, group: 1, holdMs: undefined },
        ],
        look: true,
      },
    );
    expect(decided).toMatchObject({ verdicts: { verdicts: [{ kind: "before" }, { kind: "conflict" }] } });
  }
});

test("the others of a group, of which one was granted in the same batch, are looked for", () => {
  const other = { quota: "q", subject: "ben" };
  const rows = [row(bucket, { used: 3, version: 1 }), row(other, { id: 2 })];
  const line = { bucket: 1, version: 1, kind: "consume", id: "x", amount: 3, used: 3, max: 9, at: now - 1 };
  const use = { id: "x", amount: 3, details: undefined, holdMs: undefined };
  const batch = {
    definitions,
    buckets: [bucket, other].map((each) => ({ ...each, definition: 0, limit: 9 })),
    uses: [
      { ...use, bucket: 1, group: 0 },
      { ...use, bucket: 0, group: 1 },
      { ...use, bucket: 1, group: 1 },
    ],
    look: "refused",
  } as const;
  expect(decideUses({ now, buckets: rows.map((each) => ({ row: each })) }, batch)).toMatchObject({
    need: { what: "lines" },
  });
  const lines = [new Map([["x", line as LineRow]]), new Map<string, LineRow>()];
  const views = rows.map((each, i) => ({ row: each, lines: lines[i] as Map<string, LineRow> }));
  expect(decideUses({ now, buckets: views }, batch)).toMatchObject({
    verdicts: { verdicts: [{ kind: "granted" }, { kind: "before" }, { kind: "before" }] },
  });
});
