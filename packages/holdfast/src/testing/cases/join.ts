import { NotInTransactionError, LockNotAvailableError } from "../../seam/errors.ts";
import { key } from "../../seam/key.ts";
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
