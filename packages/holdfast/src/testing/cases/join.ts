import { AsyncLocalStorage } from "node:async_hooks";
import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { isSupported } from "../../seam/capabilities.ts";
import { LockNotAvailableError, NotInTransactionError, PoolExhaustedError } from "../../seam/errors.ts";
import { key } from "../../seam/key.ts";
import { once } from "../../index.ts";
import { queue } from "../../queue/index.ts";
import { quota } from "../../quota/index.ts";
import { stock } from "../../stock/index.ts";
import type { Ground } from "../ground.ts";
import { TestGate, assert, during, suite } from "./support.ts";

export const joinCases = suite("join", {
  "locks until the caller's own transaction ends": async ({ hf, other, site, fresh, capabilities }) => {
    const lock = key("join", fresh);
    await site.ownTransaction(async (native) => {
      const joined = hf.join(native);
      await joined.lock(lock);
      assert.ok(joined.holds(lock));
      // Again is no harm, and neither is another handle on the same transaction.
      await hf.join(native).lock(lock, { wait: "nowait" });
      if (capabilities.connections === "many")
        assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: false });
    });
    assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: true, value: 1 });
  },

  "excludes, and is excluded by, transactions that Holdfast opened": async ({
    hf,
    other,
    site,
    fresh,
    capabilities,
  }) => {
    if (capabilities.connections === "one" || capabilities.granularity === "database")
      return oneAfterTheOther({ hf, other, site, fresh });
    const lock = key("both", fresh);
    await during(
      (inside) => other.transaction({ lock }, inside),
      () =>
        site.ownTransaction(async (native) => {
          assert.equal(await hf.join(native).tryLock(lock), false);
          await assert.rejects(hf.join(native).lock(lock, { wait: "nowait" }), LockNotAvailableError);
        }),
    );
    await site.ownTransaction(async (native) => {
      assert.equal(await hf.join(native).tryLock([lock, key("both2", fresh)]), true);
      await assert.rejects(
        other.transaction({ lock, wait: "nowait" }, async () => assert.fail("entered")),
        LockNotAvailableError,
      );
    });
  },

  "refuses a client that is in no transaction": async ({ hf, other, site, fresh }) => {
    const lock = key("idle", fresh);
    await site.withIdle(async (native) => {
      await assert.rejects(async () => hf.join(native).lock(lock), NotInTransactionError);
    });
    assert.equal((await other.tryLock(lock, async () => 1)).acquired, true);
  },

  "patterns refuse a client that is in no transaction, and write nothing": async ({
    hf,
    other,
    site,
    fresh,
    capabilities,
  }) => {
    if (!isSupported(capabilities.quotas)) return;
    const uploads = quota(hf, { name: fresh, limit: 5 });
    const shop = stock(hf, { name: fresh });
    const mails = queue(hf, fresh);
    const refused = async (tx: object) => {
      await assert.rejects(async () => uploads.consume("u", 1, { tx }), NotInTransactionError);
      await assert.rejects(async () => shop.increase("CAP", 1, { tx }), NotInTransactionError);
      await assert.rejects(async () => mails.enqueue({}, { tx }), NotInTransactionError);
      await assert.rejects(async () => once(hf, [fresh], async () => {}, { tx }), NotInTransactionError);
    };
    await site.withIdle(async (native) => refused(native as object));
    for (const nothing of [{}, [], () => {}]) await refused(nothing);
    assert.equal((await quota(other, { name: fresh, limit: 5 }).peek("u")).used, 0);
    assert.equal((await stock(other, { name: fresh }).levels()).length, 0);
    assert.equal((await queue(other, fresh).counts()).waiting, 0);
    // In a transaction they take part in it.
    await site.ownTransaction(async (native) => {
      await uploads.consume("u", 2, { tx: native as object });
    });
    assert.equal((await uploads.peek("u")).used, 2);
  },

  "a call that forgets the caller's own transaction is reported, where the client tells of it": async ({
    another,
    other,
    site,
    fresh,
    capabilities,
  }) => {
    // Where one transaction locks the whole file, its site may open it with another client.
    if (
      !site.database.openings ||
      !isSupported(capabilities.quotas) ||
      capabilities.granularity === "database"
    )
      return;
    const hf = another();
    const uploads = quota(hf, { name: fresh, limit: 9 });
    await uploads.consume("u");
    const reports: unknown[] = [];
    // The channel is the whole process's, in which other clients may be tried at the same time.
    const mine = new AsyncLocalStorage<true>();
    const report = (message: unknown) => {
      if (mine.getStore()) reports.push(message);
    };
    subscribe("holdfast:connection:wrong", report);
    let kept = 0;
    /** With a warning it is done all the same, or it is told at once that there is no connection for it. */
    const apart = (use: () => Promise<unknown>) =>
      site.ownTransaction(() =>
        use().then(
          () => void kept++,
          (error: unknown) => assert.ok(error instanceof PoolExhaustedError, String(error)),
        ),
      );
    await mine.run(true, async () => {
      await apart(() => uploads.consume("u"));
      assert.equal(reports.length, 1);
      await apart(() => hf.transaction(async () => {}).then(() => void kept--));
      assert.equal(reports.length, 2);
      await apart(() => uploads.consume("u", 1, { separate: true }));
      await site.ownTransaction((tx) => uploads.consume("u", 1, { tx: tx as object }));
      await uploads.consume("u");
    });
    unsubscribe("holdfast:connection:wrong", report);
    assert.equal(reports.length, 2);
    assert.equal(kept, capabilities.connections === "one" ? 0 : 2);
    assert.equal((await quota(other, { name: fresh, limit: 9 }).peek("u")).used, 3 + kept);
  },

  "refuses what is no client at all": async ({ hf }) => {
    for (const nothing of [undefined, null, 7, "client", {}, [], () => {}]) {
      await assert.rejects(async () => hf.join(nothing).lock(key("x")), NotInTransactionError);
    }
  },
});

async function oneAfterTheOther({
  hf,
  other,
  site,
  fresh,
}: Pick<Ground, "hf" | "other" | "site" | "fresh">): Promise<void> {
  const order: string[] = [];
  const inside = new TestGate();
  const own = site.ownTransaction(async (native) => {
    await hf.join(native).lock(key("both", fresh));
    inside.open();
    await new Promise((resolve) => setTimeout(resolve, 30));
    order.push("joined");
  });
  await inside.opened;
  await other.transaction({ lock: key("both", fresh), wait: 60_000 }, async () => {
    order.push("opened");
  });
  await own;
  assert.deepEqual(order, ["joined", "opened"]);
}
