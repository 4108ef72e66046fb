/** What the audit promises on every engine that keeps it. */
import { type Audit, audited, trail } from "../../audit/index.ts";
import { isSupported } from "../../seam/capabilities.ts";
import { UnsupportedError } from "../../seam/errors.ts";
import type { ConformanceCase, Ground } from "../ground.ts";
import { assert, suite } from "./support.ts";

function kept(run: (ground: Ground, what: Audit) => Promise<void>): ConformanceCase["run"] {
  return async (ground) => {
    const { capabilities, hf, fresh } = ground;
    const what = { action: "test.change", target: fresh, actor: "ada" };
    if (isSupported(capabilities.audit)) return run(ground, what);
    await assert.rejects(
      audited(hf, what, async () => assert.fail("it was done")),
      UnsupportedError,
    );
    await assert.rejects(trail(hf), UnsupportedError);
  };
}

export const auditCases = suite("audit", {
  "writes a line before the work, and what became of it after": kept(async ({ hf, other, fresh }, what) => {
    const details = { note: "it's ü", amount: 5, nested: [1, { a: null }] };
    let id = 0;
    const value = await audited(hf, { ...what, details }, async (line) => {
      id = line;
      const [begun] = await trail(other, { target: fresh });
      assert.deepEqual([begun?.id, begun?.outcome, begun?.endedAt], [line, "begun", undefined]);
      return { big: 2n ** 60n, text: "done" };
    });
    assert.equal(value.text, "done");
    const [line, ...none] = await trail(other, { target: fresh });
    assert.deepEqual(none, []);
    const { at, endedAt, ...rest } = line ?? assert.fail("no line");
    assert.deepEqual(rest, {
      id,
      ...what,
      details,
      outcome: "done",
      error: undefined,
      result: { big: String(2n ** 60n), text: "done" },
    });
    assert.ok(endedAt && endedAt >= at);
  }),

  "keeps the error of work that failed, and throws it on": kept(async ({ hf, fresh }, what) => {
    const failing = audited(hf, what, async () => {
      throw new RangeError("too \0 far");
    });
    await assert.rejects(failing, RangeError);
    const [line] = await trail(hf, { target: fresh });
    assert.deepEqual([line?.outcome, line?.result, line?.details], ["failed", undefined, undefined]);
    assert.match(line?.error ?? "", /too \ufffd far/);
  }),

  "has one line for each, with its own id, however many come at once": kept(
    async ({ hf, other, fresh }, what) => {
      const ids = await Promise.all(
        Array.from({ length: 20 }, (_, i) => audited(i % 2 ? hf : other, what, async (line) => line)),
      );
      assert.equal(new Set(ids).size, 20);
      const lines = await trail(hf, { target: fresh });
      assert.deepEqual(
        lines.map(({ id, result }) => [id, result]),
        ids.toSorted((a, b) => b - a).map((id) => [id, id]),
      );
    },
  ),

  "is read page by page, the newest first": kept(async ({ hf, fresh }, what) => {
    const ids: number[] = [];
    for (let i = 0; i < 5; i++) ids.push(await audited(hf, what, async (line) => line));
    ids.reverse();
    const found: number[] = [];
    for (let before: number | undefined; ; before = found.at(-1)) {
      const page = await trail(hf, { target: fresh, limit: 2, ...(before !== undefined && { before }) });
      if (page.length === 0) break;
      found.push(...page.map(({ id }) => id));
    }
    assert.deepEqual(found, ids);
    assert.deepEqual(await trail(hf, { target: `${fresh} of nobody` }), []);
  }),

  "is part of the transaction whose body calls, and rolled back with it": kept(
    async ({ hf, fresh }, what) => {
      const failing = hf.transaction(async () => {
        await audited(hf, what, async () => 1);
        assert.equal((await trail(hf, { target: fresh })).length, 1);
        throw new Error("undone");
      });
      await assert.rejects(failing, /undone/);
      assert.deepEqual(await trail(hf, { target: fresh }), []);
      await hf.transaction(() => audited(hf, what, async () => 1));
      assert.deepEqual(
        (await trail(hf, { target: fresh })).map(({ outcome }) => outcome),
        ["done"],
      );
    },
  ),
});
