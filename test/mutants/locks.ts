/** Trials of locks, transactions, leases, versions and once. */
import { setTimeout as sleep } from "node:timers/promises";
import { type Lease, StaleFenceError, fenced, key, leader, once, versioned } from "holdfast";
import { fromPg } from "holdfast/pg";
import { explore, models, recorder } from "holdfast/testing";
import { lies, startLyingProxy } from "../harness/lying-proxy.ts";
import { isCommit } from "../harness/proxy.ts";
import { eventually } from "../harness/wait.ts";
import { Broken, type Ground, explained, promised, refused, succeeds } from "./ground.ts";
import type { Trial } from "./trials.ts";

const waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'";

export const lockTrials: readonly Trial[] = [
  {
    name: "two uploads of one user, in every order",
    by: "explorer",
    kills: ["lockBeforeRead"],
    async run(ground) {
      await ground.ask("CREATE TABLE image (bytes int NOT NULL)");
      const [one, two] = [ground.instance(), ground.instance()];
      const upload = (hf: typeof one) => () =>
        hf.transaction({ lock: key("upload", 7) }, async ({ client }) => {
          const { rows } = await client.query("SELECT coalesce(sum(bytes), 0)::int AS used FROM image");
          if (rows[0].used + 60 > 100) return;
          await client.query("INSERT INTO image VALUES (60)");
        });
      const found = await explore("upload", {
        db: fromPg(ground.pool),
        actors: { A: upload(one), B: upload(two) },
        invariant: async () => {
          const used = await ground.number("SELECT sum(bytes) FROM image");
          if (used !== 60) throw new Error(`${used} bytes of 100 allowed`);
        },
        reset: () => ground.ask("DELETE FROM image"),
      });
      promised(found.ok, found.text);
    },
  },
  {
    name: "two who want the same two keys, in the other's order",
    by: "chaos",
    kills: ["keysInOrder"],
    async run(ground) {
      const [one, two, third] = [ground.instance(), ground.instance(), ground.instance()];
      const [a, b] = [key("key", "a"), key("key", "b")];
      // Both are kept until both are waited for: whoever gets the first one next wants the second.
      const held = [await third.hold(a), await third.hold(b)];
      const take = (hf: typeof one, lock: (typeof a)[]) =>
        succeeds(
          hf.transaction({ lock, retry: false }, () => sleep(5)),
          "a transaction with two keys",
        );
      const both = Promise.all([take(one, [a, b]), take(two, [b, a])]);
      await eventually(async () => (await ground.number(waiting)) >= 2);
      await Promise.all(held.map((each) => each.release()));
      await both;
    },
  },
  {
    name: "SERIALIZABLE, 6 callers who count up",
    by: "chaos",
    kills: ["failuresRetried"],
    async run(ground) {
      await ground.ask("CREATE TABLE n (n int NOT NULL)");
      await ground.ask("INSERT INTO n VALUES (0)");
      const hf = ground.instance({ retry: { attempts: 200, maxMs: 50 } });
      const caller = async () => {
        for (let i = 0; i < 5; i++)
          await succeeds(
            hf.transaction({ isolation: "serializable" }, async ({ client }) => {
              const { rows } = await client.query("SELECT n FROM n");
              await sleep(2);
              await client.query("UPDATE n SET n = $1", [rows[0].n + 1]);
            }),
            "a transaction that another one was in the way of",
          );
      };
      await Promise.all(Array.from({ length: 6 }, caller));
      promised((await ground.number("SELECT n FROM n")) === 30, "an update was lost");
    },
  },
  {
    name: "a statement through the outer client",
    by: "chaos",
    kills: ["wrongConnection"],
    async run(ground) {
      await ground.ask("CREATE TABLE effect (n int)");
      const hf = ground.on(ground.pool, { wrongConnection: "throw" });
      await refused(
        hf.transaction(async () => {
          await ground.pool.query("INSERT INTO effect VALUES (1)");
          throw new Error("undone");
        }),
        "HF_WRONG_CONNECTION",
        "a statement apart from its transaction",
      );
    },
  },
  {
    name: "a holder that the server does not hear of any more",
    by: "chaos",
    kills: ["serverDeadline"],
    async run(ground) {
      const proxy = await ground.proxy();
      const frozen = ground.instance({}, proxy.url(ground.url));
      const other = ground.instance();
      const holding = Promise.withResolvers<void>();
      const lost = frozen.transaction({ lock: key("frozen"), deadline: 1500, retry: false }, async () => {
        holding.resolve();
        await sleep(60_000, undefined, { ref: false });
      });
      lost.catch(() => {});
      await holding.promise;
      proxy.freeze();
      await succeeds(
        other.transaction({ lock: key("frozen"), wait: 10_000 }, async () => {}),
        "the next one, 10 s later",
      );
    },
  },
  {
    name: "answers to COMMIT that are lost",
    by: "chaos",
    kills: ["commitLookedUp"],
    async run(ground) {
      await ground.ask("CREATE TABLE effect (n int)");
      const proxy = await ground.proxy();
      const hf = ground.instance({}, proxy.url(ground.url));
      for (let i = 0; i < 5; i++) {
        proxy.cutWhen((direction, chunk) => {
          if (direction !== "to-server" || !isCommit(chunk)) return "pass";
          proxy.cutWhen(undefined);
          return "drop-answer";
        });
        await hf.transaction(({ client }) => client.query("INSERT INTO effect VALUES ($1)", [i]));
        const times = await ground.number(`SELECT count(*) FROM effect WHERE n = ${i}`);
        promised(times === 1, `what was told once was done ${times} times`);
      }
    },
  },
  {
    name: "a body that swallows an error",
    by: "chaos",
    kills: ["abortedCommitSeen"],
    async run(ground) {
      await ground.ask("CREATE TABLE effect (n int)");
      const hf = ground.instance();
      await refused(
        hf.transaction({ retry: false }, async ({ client }) => {
          await client.query("INSERT INTO effect VALUES (1)");
          await client.query("SELECT 1 / 0").catch(() => {});
        }),
        "HF_TRANSACTION_ABORTED",
        "a transaction of which nothing was kept",
      );
    },
  },
  {
    name: "a holder that is late, and writes",
    by: "history",
    kills: ["fenceChecked"],
    async run(ground) {
      const ttl = 400;
      await ground.ask("CREATE TABLE doc (value text)");
      await ground.ask("INSERT INTO doc VALUES (NULL)");
      const record = recorder();
      const [one, two] = [ground.instance(), ground.instance()];
      const acquire = (process: string, hf: typeof one) =>
        record("doc", "acquire", undefined, () => hf.lease(key("doc"), { ttl, renew: false, wait: 5000 }), {
          process,
          output: ({ fence }) => ({ fence }),
        });
      const write = (process: string, hf: typeof one, lease: Lease) => {
        const { fence } = lease;
        const work = async () => {
          try {
            await hf.transaction(async (tx) => {
              await fenced(tx, lease);
              await tx.client.query("UPDATE doc SET value = $1", [process]);
            });
            return true;
          } catch (error) {
            if (error instanceof StaleFenceError) return false;
            throw error;
          }
        };
        return record("doc", "write", { fence, value: process }, work, { process });
      };
      const first = await acquire("first", one);
      await write("first", one, first);
      const second = await acquire("second", two);
      await write("second", two, second);
      await write("first", one, first);
      const value = async () => (await ground.ask("SELECT value FROM doc"))[0]?.["value"];
      await record("doc", "read", undefined, value, { process: "first" });
      explained(record.history(), models.fencedRegister({ ttl }));
    },
  },
  {
    name: "leases that are given and given back",
    by: "history",
    kills: ["fenceGrows"],
    async run(ground) {
      const record = recorder();
      const caller = async (process: string) => {
        const hf = ground.instance();
        for (let i = 0; i < 10; i++) {
          const owner = { owner: `${process} ${i}` };
          const take = () => hf.lease(key("fence"), { ttl: 10_000 });
          const output = ({ fence }: Lease) => ({ fence });
          const lease = await record("fence", "acquire", owner, take, { process, output });
          await record("fence", "release", owner, () => lease.release(), { process });
        }
      };
      await Promise.all(["one", "two"].map(caller));
      explained(record.history(), models.lock());
    },
  },
  {
    name: "a standby that takes over, and lacks the newest fences",
    by: "history",
    kills: ["fenceGeneration"],
    async run(ground) {
      const record = recorder();
      const hf = ground.instance();
      const grant = async (owner: string) => {
        const take = () => hf.lease(key("promoted"), { ttl: 10_000 });
        const output = ({ fence }: Lease) => ({ fence });
        const lease = await record("promoted", "acquire", { owner }, take, { process: "one", output });
        await record("promoted", "release", { owner }, () => lease.release(), { process: "one" });
      };
      for (let i = 0; i < 5; i++) await grant(`before ${i}`);
      // As it is after a promotion: the numbers are behind, and the timeline is not the one that was written down.
      await ground.ask("SELECT setval('holdfast.fence', 2)");
      await ground.ask("UPDATE holdfast.resource SET seen = seen - 1 WHERE id = 'holdfast.generation'");
      for (let i = 0; i < 5; i++) await grant(`after ${i}`);
      explained(record.history(), models.lock());
    },
  },
  {
    name: "a lease that somebody else has",
    by: "history",
    kills: ["leaseUntilOver"],
    async run(ground) {
      const ttl = 20_000;
      const record = recorder();
      const caller = async (process: string) => {
        const hf = ground.instance();
        for (let i = 0; i < 5; i++) {
          const take = () =>
            hf.lease(key("taken"), { ttl, wait: "nowait" }).catch((error: { code?: string }) => {
              if (error.code === "HF_LOCK_NOT_AVAILABLE") return false as const;
              throw error;
            });
          const lease = await record("taken", "acquire", undefined, take, {
            process,
            output: (found) => found && { fence: found.fence },
          });
          if (!lease) continue;
          await sleep(20);
          const { fence } = lease;
          // That it was taken away is told by an error.
          const release = () =>
            lease.release().then(
              () => true,
              () => false,
            );
          await record("taken", "release", { fence }, release, { process });
        }
      };
      await Promise.all(["one", "two", "three"].map(caller));
      explained(record.history(), models.fencedRegister({ ttl }));
    },
  },
  {
    name: "a holder that cannot renew its lease",
    by: "chaos",
    kills: ["leaseTrustEnds"],
    async run(ground) {
      const proxy = await ground.proxy();
      const lease = await ground.instance({}, proxy.url(ground.url)).lease(key("renewed"), { ttl: 1500 });
      proxy.freeze();
      await ground.instance().lease(key("renewed"), { ttl: 5000, wait: 20_000 });
      promised(lease.signal.aborted, "the next one has the lease, and the last one has not been told");
    },
  },
  {
    name: "two updates of one row, in every order",
    by: "explorer",
    kills: ["versionCompared"],
    async run(ground) {
      await ground.ask("CREATE TABLE account (id int PRIMARY KEY, n int NOT NULL, version int NOT NULL)");
      await ground.ask("INSERT INTO account VALUES (1, 0, 0)");
      const update = () => {
        const accounts = versioned<{ id: number; n: number; version: number }>(ground.instance(), "account");
        return () => accounts.update(1, ({ n }) => ({ n: n + 1 }));
      };
      const found = await explore("update", {
        db: fromPg(ground.pool),
        actors: { A: update(), B: update() },
        invariant: async () => {
          const n = await ground.number("SELECT n FROM account");
          if (n !== 2) throw new Error(`counted up twice, it is ${n}`);
        },
        reset: () => ground.ask("UPDATE account SET n = 0, version = 0"),
      });
      promised(found.ok, found.text);
    },
  },
  {
    name: "one message that comes four times at once",
    by: "history",
    kills: ["onceLocked"],
    async run(ground) {
      await ground.ask("CREATE TABLE effect (id text)");
      const record = recorder();
      const instances = [ground.instance(), ground.instance()];
      for (let round = 0; round < 5; round++) {
        const id = `message ${round}`;
        const deliver = (hf: (typeof instances)[0], process: string) => {
          const work = async () => {
            const { value, replayed } = await once(hf, ["trial", id], async ({ client }) => {
              await client.query("INSERT INTO effect VALUES ($1)", [id]);
              await sleep(20);
              return process;
            });
            return { value, replayed };
          };
          return succeeds(record(id, "run", undefined, work, { process }), "a duplicate");
        };
        await Promise.all(instances.flatMap((hf, i) => [deliver(hf, `${i} a`), deliver(hf, `${i} b`)]));
        const count = () => ground.number(`SELECT count(*) FROM effect WHERE id = '${id}'`);
        await record(id, "effects", undefined, count, { process: "0 a" });
      }
      explained(record.history(), models.once());
    },
  },
  {
    name: "a leader whose lease is gone",
    by: "chaos",
    kills: ["leaderStops"],
    async run(ground) {
      const told = Promise.withResolvers<"told">();
      const leading = Promise.withResolvers<void>();
      const hf = ground.instance();
      const candidate = leader(
        hf,
        "trial",
        async ({ signal }) => {
          leading.resolve();
          signal.addEventListener("abort", () => told.resolve("told"), { once: true });
          await Promise.race([told.promise, sleep(20_000, undefined, { ref: false })]);
        },
        { ttl: 1500, onError: () => {} },
      );
      ground.later(() => candidate.stop());
      await leading.promise;
      await ground.ask("DELETE FROM holdfast.lease");
      const heard = await Promise.race([told.promise, sleep(10_000, "not told", { ref: false })]);
      if (heard !== "told") throw new Broken("10 s after its lease was lost the leader has not been told");
    },
  },
  {
    name: "a proxy that gives another isolation",
    by: "chaos",
    kills: ["isolationVerified"],
    async run(ground) {
      const hf = ground.instance({}, await lying(ground, "every transaction is READ COMMITTED"));
      await refused(
        hf.transaction({ isolation: "serializable" }, async () => {}),
        "HF_ISOLATION",
        "a SERIALIZABLE transaction, which is READ COMMITTED",
      );
    },
  },
  {
    name: "locks of one node, and a snapshot by another name",
    by: "chaos",
    kills: ["locksVerified"],
    async run(ground) {
      for (const lie of ["advisory locks are of one node", "READ COMMITTED is a snapshot"]) {
        const hf = ground.instance({}, await lying(ground, lie));
        await hf.capabilities();
        await refused(
          hf.transaction({ lock: key("a") }, async () => {}),
          "HF_UNSUPPORTED",
          `${lie}, and a lock was wanted`,
        );
      }
    },
  },
  {
    name: "a process that keeps locks in another way",
    by: "chaos",
    kills: ["strategyAgreed"],
    async run(ground) {
      const advisory = ground.instance();
      const byRows = ground.instance({ strategy: "lock row" });
      await advisory.lock(key("one"), async () => {
        const other = byRows.tryLock(key("one"), async () => {});
        await refused(other, "HF_STRATEGY", "a lock row of a key whose advisory lock is held");
      });
    },
  },
];

async function lying(ground: Ground, name: string): Promise<string> {
  const proxy = await startLyingProxy(ground.url);
  ground.later(() => proxy.close());
  proxy.lie = lies.find((lie) => lie.name === name);
  if (!proxy.lie) throw new Error(`There is no lie "${name}"`);
  return proxy.url;
}
