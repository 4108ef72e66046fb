import {
  LeaseLostError,
  LockNotAvailableError,
  LockTimeoutError,
  NotInTransactionError,
  StaleFenceError,
  UsageError,
} from "../../seam/errors.ts";
import { key, shared } from "../../seam/key.ts";
import type { Holdfast } from "../../holdfast.ts";
import { type Lease, fenced } from "../../index.ts";
import type { ConformanceCase, Ground } from "../ground.ts";
import { assert, refusal, suite, where } from "./support.ts";

type Run = ConformanceCase["run"];

/** Runs where there are leases; elsewhere asking for one says why there are none. */
function leased(run: Run): Run {
  return where(
    ({ capabilities }) => capabilities.leases,
    run,
    ({ hf, fresh }) => hf.lease(key("lease", fresh)),
  );
}

function permitted(run: Run): Run {
  return where(
    ({ capabilities }) => capabilities.leases,
    run,
    ({ hf, fresh }) => hf.semaphore(key("permit", fresh), { permits: 1 }).acquire(),
  );
}

/** Long enough for a machine that has other things to do: not how long anything should take. */
const patience = 60_000;

async function eventually(what: string, so: () => boolean | Promise<boolean>): Promise<void> {
  const endsAt = performance.now() + patience;
  while (!(await so())) {
    assert.ok(performance.now() < endsAt, `not so within ${patience} ms: ${what}`);
    await pause(20);
  }
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

function aborted(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    else signal.addEventListener("abort", () => resolve(), { once: true });
  });
}

async function waitingFor(hf: Holdfast<unknown>, of: ReturnType<typeof key>): Promise<string[]> {
  return (await hf.leases(of)).filter(({ waiting }) => waiting).map(({ holder }) => holder);
}

/** Whether a transaction keeps every other connection of its process from writing. */
function alone({ connections, granularity }: Ground["capabilities"]): boolean {
  return connections === "one" || granularity === "database";
}

/** A lease that has run out, and the one who has it now. */
async function stolen({ hf, other, fresh }: Ground): Promise<{ lost: Lease; taken: Lease }> {
  const lost = await hf.lease(key("stolen", fresh), { ttl: 200, renew: false });
  const taken = await other.lease(key("stolen", fresh), { wait: patience });
  return { lost, taken };
}

export const leaseCases: ConformanceCase[] = [
  ...suite("lease", {
    "lets one in at a time, across instances, with fences that grow": leased(async ({ hf, other, fresh }) => {
      let inside = 0;
      let most = 0;
      const fences: number[] = [];
      const story: string[] = [];
      const tell = (what: string, { fence, since, until }: Lease) =>
        story.push(
          `${performance.now().toFixed(1)} ms: ${fence} ${what} (${since.toISOString()} to ${until.toISOString()})`,
        );
      const enter = async (instance: typeof hf) => {
        const lease = await instance.lease(key("one", fresh), { wait: patience });
        most = Math.max(most, ++inside);
        fences.push(lease.fence);
        tell("in", lease);
        await pause(1);
        inside--;
        tell("out", lease);
        await lease.release();
        tell("released", lease);
      };
      await Promise.all(Array.from({ length: 12 }, (_, i) => enter(i % 2 ? hf : other)));
      assert.equal(most, 1, story.join("\n"));
      assert.deepEqual(
        fences,
        fences.toSorted((a, b) => a - b),
      );
      assert.equal(new Set(fences).size, 12);
    }),

    "is another thing than the lock of its key, and both can be had": leased(async ({ hf, other, fresh }) => {
      const both = key("both", fresh);
      const lease = await hf.lease(both);
      assert.deepEqual(await other.tryLock(both, async () => 1), { acquired: true, value: 1 });
      assert.equal(await other.lease(both, { wait: "skip" }), undefined);
      await hf.transaction({ lock: both }, (tx) => fenced(tx, lease));
      await lease.release();
    }),

    "runs out, and goes to another only after its holder was told": leased(async (ground) => {
      const { lost, taken } = await stolen(ground);
      assert.ok(lost.signal.aborted);
      assert.ok(lost.signal.reason instanceof LeaseLostError, String(lost.signal.reason));
      assert.ok(taken.fence > lost.fence);
      assert.ok(taken.since >= lost.until);
      assert.throws(() => lost.throwIfLost(), LeaseLostError);
      await assert.rejects(lost.renew(), LeaseLostError);
      await assert.rejects(lost.release(), LeaseLostError);
      taken.throwIfLost();
      await taken.release();
    }),

    "is renewed for as long as it is held": leased(async ({ hf, other, fresh }) => {
      const lease = await hf.lease(key("renewed", fresh), { ttl: 3000 });
      const { until } = lease;
      await eventually("it lasts longer", () => lease.until > until);
      lease.throwIfLost();
      assert.equal(await other.lease(key("renewed", fresh), { wait: "skip" }), undefined);
      await lease.release();
    }),

    "aborts its signal if it is not renewed, and never comes back": leased(async ({ hf, other, fresh }) => {
      const lease = await hf.lease(key("signal", fresh), { ttl: 150, renew: false });
      const { signal } = lease;
      await aborted(signal);
      assert.throws(() => signal.throwIfAborted(), LeaseLostError);
      await assert.rejects(lease.renew(30_000), LeaseLostError);
      // Nobody has taken it, so there is something to give back.
      await lease.release();
      assert.deepEqual(await other.leases(key("signal", fresh)), []);
    }),

    "is known to be lost before any timer has run": leased(async ({ hf, fresh }) => {
      const lease = await hf.lease(key("busy loop", fresh), { ttl: 150 });
      const { signal } = lease;
      // What a stopped process looks like from inside: the time is gone, and nothing has happened.
      const endsAt = performance.now() + 200;
      while (performance.now() < endsAt);
      assert.ok(signal.aborted);
      assert.throws(() => lease.throwIfLost(), LeaseLostError);
      await assert.rejects(lease.renew(), LeaseLostError);
      await lease.release();
    }),

    "is renewed by hand": leased(async ({ hf, other, fresh }) => {
      const lease = await hf.lease(key("by hand", fresh), { ttl: 30_000, renew: false });
      const { until } = lease;
      await lease.renew(90_000);
      assert.ok(lease.until.getTime() > until.getTime() + 30_000);
      // Never shorter: the answer to an earlier call may come late.
      const longer = lease.until;
      await lease.renew(100);
      assert.ok(lease.until >= longer);
      assert.equal(await other.lease(key("by hand", fresh), { wait: "skip" }), undefined);
      await lease.release();
      await assert.rejects(lease.renew(), UsageError);
      assert.throws(() => lease.throwIfLost(), LeaseLostError);
    }),

    "refuses, skips or gives up, and says who has it": leased(async ({ hf, other, fresh }) => {
      const lock = key("busy", fresh);
      const lease = await hf.lease(lock, { holder: "the first one" });
      await assert.rejects(other.lease(lock, { wait: "nowait" }), LockNotAvailableError);
      assert.equal(await other.lease(lock, { wait: "skip" }), undefined);
      const error = await refusal(() => other.lease(lock, { wait: 150 }).catch((e: unknown) => e), true);
      assert.ok(error instanceof LockTimeoutError, String(error));
      assert.deepEqual(error.keys, [lock.name]);
      assert.deepEqual(
        error.holders.map(({ pid, state }) => [pid, state]),
        [["the first one", `fence ${lease.fence}`]],
      );
      assert.match(error.message, /the first one/);
      await lease.release();
      await (await other.lease(lock, { wait: "nowait" })).release();
    }),

    "is handed over when it is released": leased(async ({ hf, other, fresh }) => {
      const lock = key("over", fresh);
      const lease = await hf.lease(lock);
      const order: string[] = [];
      const waiting = other.lease(lock, { wait: patience }).then((next) => {
        order.push("next");
        return next;
      });
      await pause(150);
      order.push("released");
      await lease.release();
      const next = await waiting;
      assert.deepEqual(order, ["released", "next"]);
      assert.ok(next.fence > lease.fence);
      await next.release();
    }),

    "is given back although its caller was aborted, and once": leased(async ({ hf, other, fresh }) => {
      const lock = key("aborted", fresh);
      const controller = new AbortController();
      const lease = await hf.lease(lock, { signal: controller.signal });
      controller.abort(new Error("enough"));
      // The signal was for the wait: what was granted stays until it is given back.
      lease.throwIfLost();
      assert.equal(await other.lease(lock, { wait: "skip" }), undefined);
      await Promise.all([lease.release(), lease.release()]);
      await lease.release();
      {
        await using again = await other.lease(lock, { wait: "nowait" });
        assert.ok(again.fence > lease.fence);
      }
      await (await hf.lease(lock, { wait: "nowait" })).release();
    }),

    "gives a wait up when it is aborted, and leaves nothing behind": leased(async ({ hf, other, fresh }) => {
      const lock = key("abort", fresh);
      const lease = await hf.lease(lock);
      for (const wanted of [lock, shared(lock)]) {
        const controller = new AbortController();
        const reason = new Error("enough");
        const waiting = other.lease(wanted, { wait: patience, signal: controller.signal });
        const refused = assert.rejects(waiting, (e) => e === reason);
        await pause(100);
        controller.abort(reason);
        await refused;
        await eventually("nobody stands in line", async () => (await waitingFor(other, lock)).length === 0);
      }
      const late = AbortSignal.abort(new Error("too late"));
      await assert.rejects(other.lease(key("never", fresh), { signal: late }), /too late/);
      await lease.release();
      await eventually("nothing is left", async () => (await other.leases(lock)).length === 0);
    }),

    "ends quietly with its block when it was lost": leased(async ({ hf, other, fresh }) => {
      const lock = key("block", fresh);
      let taken: Lease | undefined;
      {
        await using lost = await hf.lease(lock, { ttl: 150, renew: false });
        taken = await other.lease(lock, { wait: patience });
        assert.ok(lost.signal.aborted);
      }
      taken.throwIfLost();
      await taken.release();
    }),

    "keeps others out for a while after its release": leased(async ({ hf, other, fresh }) => {
      const lock = key("least", fresh);
      const lease = await hf.lease(lock, { atLeastFor: 1500 });
      await lease.release();
      const early = await other.lease(lock, { wait: "skip" });
      if (early) {
        // After a pause of the whole process it is due.
        assert.ok(early.since.getTime() >= lease.since.getTime() + 1500);
        await early.release();
      }
      const next = await other.lease(lock, { wait: patience, atLeastFor: 1 });
      assert.ok(next.since.getTime() >= lease.since.getTime() + 1500);
      // Longer than it is kept from others.
      await pause(10);
      await next.release();
      await (await hf.lease(lock, { wait: "nowait" })).release();
    }),

    "is there to be read": leased(async ({ hf, other, fresh }) => {
      const lock = key("read", fresh);
      const lease = await hf.lease(lock, { holder: "reader" });
      const permit = await hf.semaphore(lock, { permits: 3, holder: "worker" }).acquire({ permits: 2 });
      const found = await other.leases(lock);
      assert.deepEqual(
        found
          .map(({ name, holder, mode, waiting }) => ({ name, holder, mode, waiting }))
          .toSorted((a, b) => (a.holder < b.holder ? -1 : 1)),
        [
          { name: lock.name, holder: "reader", mode: "exclusive", waiting: false },
          { name: lock.name, holder: "worker", mode: "permit", waiting: false },
        ],
      );
      const mine = found.find(({ holder }) => holder === "reader");
      assert.deepEqual([mine?.fence, mine?.since, mine?.until], [lease.fence, lease.since, lease.until]);
      assert.ok((await other.leases()).length >= 2);
      await Promise.all([lease.release(), permit.release()]);
      assert.deepEqual(await other.leases(lock), []);
    }),

    "is given back when its instance is closed": leased(async ({ another, other, fresh }) => {
      const lock = key("closed", fresh);
      const own = another();
      const lease = await own.lease(lock);
      const blocker = await other.lease(key("closed too", fresh));
      const waiting = own.lease(key("closed too", fresh), { wait: patience });
      const refused = assert.rejects(waiting, UsageError);
      await pause(100);
      await own.close();
      await refused;
      assert.ok(lease.signal.aborted);
      await (await other.lease(lock, { wait: "nowait" })).release();
      await assert.rejects(own.lease(lock), UsageError);
      await blocker.release();
    }),

    "takes keys of any content": leased(async ({ hf, other, fresh }) => {
      const nasty = ["'; DROP TABLE x; --", "\0", "\\", '"', "%s$1?", "😀".repeat(50), "x".repeat(10_000)];
      for (const content of nasty) {
        const lock = key("nasty", fresh, content);
        await using lease = await hf.lease(lock, { holder: `h ${content.replaceAll("\0", "")}` });
        assert.equal(await other.lease(lock, { wait: "skip" }), undefined);
        assert.equal((await other.leases(lock))[0]?.fence, lease.fence);
      }
      const long = key.hashtextextended(`${fresh} ${"é'\\".repeat(3000)}`);
      await using _long = await hf.lease(long);
      assert.equal(await other.lease(long, { wait: "skip" }), undefined);
    }),

    "refuses what cannot be right before it reaches the server": async ({ hf, fresh }) => {
      const lock = key("bad", fresh);
      const bad: [string, () => Promise<unknown>][] = [
        ["a string for a key", () => hf.lease("nightly" as never)],
        ["a list", () => hf.lease([lock, key("other")] as never)],
        ["an unknown option", () => hf.lease(lock, { tll: 1000 } as never)],
        ["a short ttl", () => hf.lease(lock, { ttl: 99 })],
        ["a long ttl", () => hf.lease(lock, { ttl: 86_400_001 })],
        ["no number for a ttl", () => hf.lease(lock, { ttl: "30s" as never })],
        ["NaN", () => hf.lease(lock, { ttl: Number.NaN })],
        ["an endless wait", () => hf.lease(lock, { wait: Infinity })],
        ["an unknown word", () => hf.lease(lock, { wait: "later" as never })],
        ["a negative atLeastFor", () => hf.lease(lock, { atLeastFor: -1 })],
        ["a holder that is none", () => hf.lease(lock, { holder: "" })],
        ["renew that is no answer", () => hf.lease(lock, { renew: "no" as never })],
        ["a signal that is none", () => hf.lease(lock, { signal: {} as never })],
        ["fenced without a lease", () => hf.transaction((tx) => fenced(tx, {} as never))],
        ["fenced without a transaction", () => fenced({}, {} as never)],
      ];
      for (const [what, call] of bad) await assert.rejects(call, UsageError, what);
    },
  }),

  ...suite("fence", {
    "lets the holder write": leased(async ({ hf, other, site, fresh }) => {
      const lease = await hf.lease(key("write", fresh));
      await hf.transaction((tx) => fenced(tx, lease));
      await hf.transaction((tx) => tx.transaction((inner) => fenced(inner, lease)));
      await site.ownTransaction((native) => fenced(hf.join(native), lease));
      await site.withIdle(async (native) => {
        await assert.rejects(fenced(hf.join(native), lease), NotInTransactionError);
      });
      // Any instance on the same database will do.
      await other.transaction((tx) => fenced(tx, lease));
      await lease.release();
    }),

    "refuses one whose lease somebody else has": leased(async (ground) => {
      const { hf, site } = ground;
      const { lost, taken } = await stolen(ground);
      const stale = (error: unknown) => {
        assert.ok(error instanceof StaleFenceError, String(error));
        assert.deepEqual([error.fence, error.newest], [lost.fence, taken.fence]);
        return true;
      };
      await assert.rejects(
        hf.transaction((tx) => fenced(tx, lost)),
        stale,
      );
      await assert.rejects(
        site.ownTransaction((native) => fenced(hf.join(native), lost)),
        stale,
      );
      await hf.transaction((tx) => fenced(tx, taken));
      await taken.release();
      await assert.rejects(
        hf.transaction((tx) => fenced(tx, lost)),
        StaleFenceError,
      );
    }),

    "refuses one who has released it": leased(async ({ hf, fresh }) => {
      for (const atLeastFor of [0, 5000]) {
        const lease = await hf.lease(key("released", fresh, atLeastFor), { atLeastFor });
        await lease.release();
        await assert.rejects(
          hf.transaction((tx) => fenced(tx, lease)),
          StaleFenceError,
        );
      }
    }),

    "keeps the lease from others until the transaction ends, although it ran out": leased(
      async ({ hf, other, fresh, capabilities }) => {
        if (alone(capabilities)) return;
        const lock = key("open", fresh);
        const lease = await hf.lease(lock, { ttl: 300, renew: false });
        await hf.transaction(async (tx) => {
          await fenced(tx, lease);
          await eventually("it has run out", async () => (await other.leases(lock)).length === 0);
          assert.equal(await other.lease(lock, { wait: "skip" }), undefined);
          // Still nobody else's: the same transaction may be asked again.
          await fenced(tx, lease);
        });
        await (await other.lease(lock, { wait: patience })).release();
      },
    ),

    "does not wait for itself when the lease is released before COMMIT": leased(
      async ({ hf, other, fresh, capabilities }) => {
        const lock = key("early", fresh);
        const lease = await hf.lease(lock);
        await hf.transaction(async (tx) => {
          await fenced(tx, lease);
          if (alone(capabilities)) return assert.rejects(lease.release(), UsageError);
          await lease.release();
          assert.equal(await other.lease(lock, { wait: "skip" }), undefined);
        });
        if (alone(capabilities)) await lease.release();
        await (await other.lease(lock, { wait: patience })).release();
      },
    ),

    "does not stop renewals": leased(async ({ hf, fresh, capabilities }) => {
      const lease = await hf.lease(key("renewing", fresh));
      await hf.transaction(async (tx) => {
        await fenced(tx, lease);
        if (alone(capabilities)) return assert.rejects(lease.renew(60_000), UsageError);
        await lease.renew(60_000);
      });
      await lease.renew(60_000);
      await lease.release();
    }),

    "and transactions that exclude one another: a lease is not to be had inside": leased(
      async ({ hf, fresh, capabilities }) => {
        const lock = key("inside", fresh);
        await hf.transaction(async () => {
          if (alone(capabilities)) return assert.rejects(hf.lease(lock), UsageError);
          await (await hf.lease(lock)).release();
        });
        await (await hf.lease(lock, { wait: "nowait" })).release();
      },
    ),
  }),

  ...suite("reader-writer", {
    "shares with sharers only": leased(async ({ hf, other, fresh }) => {
      const lock = key("shared", fresh);
      const [one, two] = [await hf.lease(shared(lock)), await other.lease(shared(lock), { wait: "nowait" })];
      assert.equal(await other.lease(lock, { wait: "skip" }), undefined);
      await one.release();
      assert.equal(await hf.lease(lock, { wait: "skip" }), undefined);
      await two.release();
      const writer = await hf.lease(lock, { wait: "nowait" });
      assert.equal(await other.lease(shared(lock), { wait: "skip" }), undefined);
      assert.deepEqual(
        (await other.leases(lock)).map(({ mode }) => mode),
        ["exclusive"],
      );
      await writer.release();
    }),

    "serves who came first": leased(async ({ hf, other, fresh }) => {
      const lock = key("line", fresh);
      const first = await hf.lease(lock);
      const order: string[] = [];
      const waiting: Promise<void>[] = [];
      const stand = async (who: string, wanted: Parameters<typeof hf.lease>[0]) => {
        waiting.push(
          other.lease(wanted, { wait: patience, holder: who }).then(async (lease) => {
            order.push(who);
            await pause(20);
            await lease.release();
          }),
        );
        await eventually(`${who} stands in line`, async () => (await waitingFor(hf, lock)).includes(who));
      };
      await stand("reader 1", shared(lock));
      await stand("writer 1", lock);
      await stand("reader 2", shared(lock));
      await stand("writer 2", lock);
      // Those who do not wait must not push in either.
      assert.equal(await hf.lease(shared(lock), { wait: "skip" }), undefined);
      await first.release();
      await Promise.all(waiting);
      assert.deepEqual(order, ["reader 1", "writer 1", "reader 2", "writer 2"]);
      await eventually("nothing is left", async () => (await hf.leases(lock)).length === 0);
    }),

    "lets a writer in although there always is a reader": leased(async ({ hf, other, fresh }) => {
      const lock = key("starve", fresh);
      let held = await hf.lease(shared(lock));
      let entered = false;
      const writer = other.lease(lock, { wait: patience }).then(async (lease) => {
        entered = true;
        await lease.release();
      });
      const endsAt = performance.now() + 10_000;
      // The next one comes before the last one goes, for as long as it gets in.
      while (!entered && performance.now() < endsAt) {
        const next = await hf.lease(shared(lock), { wait: "skip" });
        await held.release();
        held = next ?? (await hf.lease(shared(lock), { wait: patience }));
      }
      assert.ok(entered, "the writer was never let in");
      await held.release();
      await writer;
    }),
  }),

  ...suite("semaphore", {
    "lets so many in and no more, across instances": permitted(async ({ hf, other, fresh }) => {
      let inside = 0;
      let most = 0;
      const of = (instance: typeof hf) =>
        instance.semaphore(key("some", fresh), { permits: 3, wait: patience });
      const [one, two] = [of(hf), of(other)];
      const served = await Promise.all(
        Array.from({ length: 16 }, (_, i) =>
          (i % 2 ? one : two).use(async (permit) => {
            most = Math.max(most, ++inside);
            await pause(5);
            inside--;
            return permit.fence;
          }),
        ),
      );
      assert.ok(most <= 3, `${most} were inside`);
      assert.equal(new Set(served).size, 16);
    }),

    "counts permits": permitted(async ({ hf, other, fresh }) => {
      const [a, b] = [hf, other].map((instance) => instance.semaphore(key("count", fresh), { permits: 5 }));
      const three = await a!.acquire({ permits: 3 });
      assert.equal(await b!.acquire({ permits: 3, wait: "skip" }), undefined);
      const two = await b!.acquire({ permits: 2, wait: "nowait" });
      await assert.rejects(b!.acquire({ wait: "nowait" }), LockNotAvailableError);
      await assert.rejects(a!.acquire({ wait: 100 }), LockTimeoutError);
      await three.release();
      const again = await b!.acquire({ permits: 3, wait: "nowait" });
      await hf.transaction((tx) => fenced(tx, again));
      await Promise.all([two.release(), again.release()]);
      // A lease of the same key is another thing.
      await using _all = await a!.acquire({ permits: 5, wait: "nowait" });
      await (await hf.lease(key("count", fresh), { wait: "nowait" })).release();
    }),

    "gives back what a body used, also if it throws": permitted(async ({ hf, other, fresh }) => {
      const semaphore = hf.semaphore(key("use", fresh), { permits: 1 });
      assert.equal(await semaphore.use(async () => 7), 7);
      const own = new Error("own");
      await assert.rejects(
        semaphore.use(async () => {
          throw own;
        }),
        (e) => e === own,
      );
      await (await other.semaphore(key("use", fresh), { permits: 1 }).acquire({ wait: "nowait" })).release();
    }),

    "serves one who wants many although there always is one who wants one": permitted(
      async ({ hf, other, fresh }) => {
        const [small, large] = [hf, other].map((instance) =>
          instance.semaphore(key("large", fresh), { permits: 2, wait: patience }),
        );
        let held = await small!.acquire();
        let entered = false;
        const whole = large!.use(async () => (entered = true), { permits: 2 });
        const endsAt = performance.now() + 10_000;
        while (!entered && performance.now() < endsAt) {
          const next = await small!.acquire({ wait: "skip" });
          await held.release();
          held = next ?? (await small!.acquire());
        }
        assert.ok(entered, "the one who wants many was never let in");
        await held.release();
        await whole;
      },
    ),

    "gives a place back that ran out": permitted(async ({ hf, other, fresh }) => {
      const of = (instance: typeof hf) =>
        instance.semaphore(key("place", fresh), { permits: 2, ttl: 1000, renew: false });
      const lost = await Promise.all([of(hf).acquire(), of(hf).acquire()]);
      const taken = await of(other).acquire({ wait: patience, permits: 2 });
      for (const permit of lost) {
        assert.ok(permit.signal.aborted);
        await assert.rejects(
          hf.transaction((tx) => fenced(tx, permit)),
          StaleFenceError,
        );
      }
      await taken.release().catch(() => {});
    }),

    "refuses what cannot be right before it reaches the server": async ({ hf, fresh }) => {
      const lock = key("bad", fresh);
      const made: [string, () => unknown][] = [
        ["no permits", () => hf.semaphore(lock, {} as never)],
        ["0 permits", () => hf.semaphore(lock, { permits: 0 })],
        ["half a permit", () => hf.semaphore(lock, { permits: 1.5 })],
        ["a shared key", () => hf.semaphore(shared(lock) as never, { permits: 1 })],
        ["a string for a key", () => hf.semaphore("render" as never, { permits: 1 })],
        ["an unknown option", () => hf.semaphore(lock, { permits: 1, size: 2 } as never)],
        ["to skip by default", () => hf.semaphore(lock, { permits: 1, wait: "skip" as never })],
      ];
      for (const [what, call] of made) assert.throws(call, UsageError, what);
      const semaphore = hf.semaphore(lock, { permits: 2 });
      const bad: [string, () => Promise<unknown>][] = [
        ["more than there are", () => semaphore.acquire({ permits: 3 })],
        ["an unknown option", () => semaphore.acquire({ permit: 1 } as never)],
        ["an unknown word", () => semaphore.acquire({ wait: "later" as never })],
        ["no body", () => semaphore.use(undefined as never)],
        ["a body that is skipped", () => semaphore.use(async () => {}, { wait: "skip" as never })],
      ];
      for (const [what, call] of bad) await assert.rejects(call, UsageError, what);
    },
  }),
];
