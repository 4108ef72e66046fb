/** A hold whose entry was rolled up is known by its id to all calls of a batch that come after the one that found it. */
import { expect, test } from "vitest";
import { decideUses } from "../../../packages/holdfast/src/quota/decide/consume.ts";
import type { BucketRow } from "../../../packages/holdfast/src/quota/decide/rows.ts";

test("used for something else, it is a conflict, whether there is room or not", () => {
  const bucket = { quota: "q", subject: "ann" };
  const none = { moves: undefined, moved_to: undefined, moved_from: undefined };
  const row: BucketRow = {
    id: 1,
    ...bucket,
    used: 0,
    held: 5,
    credit: 0,
    version: 9,
    reset: 0,
    since: undefined,
    parts: undefined,
    own_limit: undefined,
    plan: undefined,
    rolled: 9,
    ...none,
  };
  const holds = [{ ...bucket, id: "x", amount: 5, until: 2_000_000 }];
  const use = { bucket: 0, id: "x", amount: 5, details: undefined };
  for (const limit of [5, 50]) {
    const decided = decideUses(
      { now: 1_000_000, buckets: [{ row, lines: new Map(), holds, grants: [] }] },
      {
        definitions: [{ rule: { window: "none" }, over: 0, plans: undefined }],
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
