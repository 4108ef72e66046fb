import { key } from "../../seam/key.ts";
import { assert, during, sql, suite, table } from "./support.ts";

export const abortCases = suite("abort", {
  "does not begin for a signal that has aborted": async ({ hf }) => {
    const reason = new Error("not wanted");
    await assert.rejects(
      hf.transaction({ signal: AbortSignal.abort(reason) }, async () => assert.fail("entered")),
      (e) => e === reason,
    );
  },

  "stops waiting for a lock, and leaves nothing behind": async ({ hf, other, fresh }) => {
    const lock = key("abort", fresh);
    const reason = new Error("not wanted any more");
    await during(
      (inside) => hf.transaction({ lock }, inside),
      async () => {
        const controller = new AbortController();
        const waiting = other.transaction({ lock, wait: 3000, signal: controller.signal }, async () =>
          assert.fail("entered"),
        );
        setTimeout(() => controller.abort(reason), 50);
        await assert.rejects(waiting, (e) => e === reason);
      },
    );
    await hf.transaction({ lock, wait: 5000 }, async () => {});
    await other.transaction({ lock, wait: 5000 }, async () => {});
  },

  "undoes what the body wrote when it is aborted in the middle": async (ground) => {
    const name = await table(ground);
    const controller = new AbortController();
    const reason = new Error("enough");
    const running = ground.hf.transaction({ signal: controller.signal }, async (tx) => {
      await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES ('a', 1)`);
      controller.abort(reason);
      assert.ok(tx.signal.aborted);
      return "finished all the same";
    });
    await assert.rejects(running, (e) => e === reason);
    const [row] = await ground.hf.transaction((tx) =>
      tx.query(sql`SELECT count(*) AS n FROM ${sql.id(name)}`),
    );
    assert.equal(Number(row?.n), 0);
  },

  "takes the connection away from a body that does not stop": async (ground) => {
    const { hf, other, fresh } = ground;
    const lock = key("stubborn", fresh);
    const controller = new AbortController();
    let wake!: () => void;
    const asleep = new Promise<void>((resolve) => (wake = resolve));
    let late: unknown = "nothing";
    let ended!: Promise<void>;
    const running = hf.transaction({ lock, signal: controller.signal }, (tx) => {
      ended = asleep.then(async () => {
        late = await tx.query(sql`SELECT 1 AS one`).catch((e: unknown) => e);
      });
      controller.abort(new Error("stop"));
      return ended;
    });
    await assert.rejects(running, /stop/);
    await other.transaction({ lock, wait: 10_000 }, async () => {});
    wake();
    await ended;
    assert.ok(late instanceof Error, "a body that was given up must not reach the database any more");
  },
});
