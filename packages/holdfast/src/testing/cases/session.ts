import { LockNotAvailableError, LockTimeoutError } from "../../seam/errors.ts";
import { key } from "../../seam/key.ts";
import { assert, during, suite, where } from "./support.ts";

export const sessionCases = suite("session", {
  "holds across transactions until it is released": where(
    ({ capabilities }) => capabilities.sessionLocks,
    async ({ hf, other, fresh }) => {
      const lock = key("hold", fresh);
      const held = await hf.hold(lock);
      await hf.transaction(async () => {});
      assert.equal(held.signal.aborted, false);
      assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: false });
      assert.deepEqual(await hf.tryLock(lock, async () => 1), { acquired: false });
      await assert.rejects(other.hold(lock, { wait: "nowait" }), LockNotAvailableError);
      await assert.rejects(other.hold(lock, { wait: 100 }), LockTimeoutError);
      await held.release();
      await held.release();
      assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: true, value: 1 });
    },
    ({ hf, fresh }) => hf.hold(key("hold", fresh)),
  ),

  "waits for a transaction that holds the key": where(
    ({ capabilities }) => capabilities.sessionLocks,
    async ({ hf, other, fresh }) => {
      const lock = key("after", fresh);
      const order: string[] = [];
      let waiting!: Promise<void>;
      await during(
        (inside) => hf.transaction({ lock }, inside),
        async () => {
          waiting = other.hold(lock, { wait: 30_000 }).then(async (held) => {
            order.push("held");
            await held.release();
          });
          await new Promise((resolve) => setTimeout(resolve, 100));
          order.push("transaction");
        },
      );
      await waiting;
      assert.deepEqual(order, ["transaction", "held"]);
    },
    ({ hf, fresh }) => hf.hold(key("after", fresh)),
  ),

  "holds several, gives back each by itself, and gives all back at the end of a block": where(
    ({ capabilities }) => capabilities.sessionLocks,
    async ({ hf, other, fresh }) => {
      const [a, b, c] = ["a", "b", "c"].map((k) => key("many", fresh, k)) as [
        ReturnType<typeof key>,
        ReturnType<typeof key>,
        ReturnType<typeof key>,
      ];
      const free = async (k: ReturnType<typeof key>) => (await other.tryLock(k, async () => 1)).acquired;
      {
        await using _first = await hf.hold([a, b]);
        const second = await hf.hold(c);
        assert.deepEqual([await free(a), await free(b), await free(c)], [false, false, false]);
        await second.release();
        assert.deepEqual([await free(a), await free(b), await free(c)], [false, false, true]);
        // The same instance is no friend of itself: its second call must wait like anybody's.
        await assert.rejects(hf.hold(a, { wait: "nowait" }), LockNotAvailableError);
      }
      assert.deepEqual([await free(a), await free(b)], [true, true]);
    },
    ({ hf, fresh }) => hf.hold(key("many", fresh)),
  ),

  "gives a wait up when it is aborted": where(
    ({ capabilities }) => capabilities.sessionLocks,
    async ({ hf, other, fresh }) => {
      const lock = key("abort", fresh);
      const held = await hf.hold(lock);
      const reason = new Error("enough");
      const controller = new AbortController();
      const waiting = other.hold(lock, { wait: 3000, signal: controller.signal });
      setTimeout(() => controller.abort(reason), 50);
      await assert.rejects(waiting, (e) => e === reason);
      await held.release();
      assert.equal((await other.tryLock(lock, async () => 1)).acquired, true);
    },
    ({ hf, fresh }) => hf.hold(key("abort", fresh)),
  ),
});
