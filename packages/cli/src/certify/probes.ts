/**
 * The table of what is tried: a name, how, and what it carries. What stands between us and a server, and the server itself, are
 * believed by what they do with two sessions, and by no name. The steps are one after the other: nothing here depends on how fast
 * they are.
 */
import { setTimeout as sleep } from "node:timers/promises";
import type { Capabilities } from "holdfast";
import { NoAnswer, within } from "../within.ts";
import type { Caller } from "./caller.ts";
import { counterHistory, registerHistory } from "./history.ts";
import { type Kit, longMs, shortMs } from "./kit.ts";
import { type Ground, type Probe, type Seen, absent, no, unknown, yes } from "./probe.ts";

const elsewhere =
  "Connect to the server itself, and not through what stands between; or turn its caching, read splitting and rewriting off for this user.";

/** By when a wait that is to end has done so. */
const endMs = 5000;

/** The methods that a probe has said it needs. */
const has = (kit: Kit): Required<Kit> => kit as Required<Kit>;

const committed: Probe = {
  id: "committed",
  title: "What one session has committed, another one reads",
  tried:
    "A reads a row, B changes it, A reads it again with the same words; three times, also in a transaction of its own",
  carries: ["versions", "once"],
  features: "everything",
  advice: elsewhere,
  across: "held",
  writer: "B",
  async run({ kit, caller, next }) {
    const [a, b] = [await caller(), await caller()];
    for (let round = 0; round < 3; round++) {
      await kit.read(a, 1);
      const n = next();
      if (round === 1) await kit.begin(b, "read committed");
      await kit.write(b, 1, n);
      if (round === 1) await kit.end(b, "COMMIT");
      const found = await kit.read(a, 1);
      if (found !== n) return no(`B had committed ${n}, and A read ${String(found)}`);
      const inside = await transactionRead(kit, a, 1);
      if (inside !== n) return no(`B had committed ${n}, and A read ${String(inside)} in a transaction`);
    }
    return yes("each read was the newest");
  },
};

async function transactionRead(kit: Kit, a: Caller, id: number): Promise<number | undefined> {
  await kit.begin(a, "read committed");
  const found = await kit.read(a, id);
  await kit.end(a, "COMMIT");
  return found;
}

const transactions: Probe = {
  id: "transactions",
  title:
    "A transaction is one: its own writes are seen in it, nobody else's view has them, ROLLBACK undoes them all",
  tried: "A changes two rows in a transaction and reads them; B reads them; A rolls back; B reads them again",
  carries: ["transactionLocks", "versions", "once"],
  features: "everything",
  advice: `A pooler in statement mode, or one that shares statements out, makes nothing exact. ${elsewhere}`,
  async run({ kit, caller, next }) {
    const [a, b] = [await caller(), await caller()];
    const before = [await kit.read(b, 1), await kit.read(b, 2)];
    const n = next();
    await kit.begin(a, "read committed");
    await kit.write(a, 1, n);
    const own = await kit.read(a, 1);
    await kit.write(a, 2, n);
    const others = [await kit.read(b, 1), await kit.read(b, 2)];
    await kit.end(a, "ROLLBACK");
    const after = [await kit.read(b, 1), await kit.read(b, 2)];
    if (own !== n) return no(`A had written ${n} in its transaction, and read ${String(own)} there`);
    if (String(others) !== String(before)) return no("B read what A had not committed");
    if (String(after) !== String(before)) return no("what A had rolled back was there");
    return yes("A read its own, B did not, and after ROLLBACK nothing was left");
  },
};

const lockExcludes: Probe = {
  id: "lock-excludes",
  title: "Two transactions cannot have one lock at once; other locks are free meanwhile",
  tried:
    "A opens a transaction with a lock, as Holdfast does; B tries for the same one, and for another; A commits; B tries again",
  carries: ["transactionLocks", "joinedLocks"],
  features: "hf.transaction({ lock }), hf.lock, hf.tryLock, hf.join, migrations",
  advice:
    'Two callers can both be let in. Use the server itself, or one of its nodes for all that writes; where the strategy can be chosen, try "lock row", and run this again.',
  across: "held",
  writer: "A",
  async run({ kit, caller, key }) {
    const [a, b, c] = [await caller(), await caller(), await caller()];
    const [mine, other] = [key(), key()];
    if ((await kit.open(a, mine, 0)) !== "granted") return no("a lock that nobody had was refused");
    if ((await kit.open(b, mine, 0)) === "granted") return no("A had the lock, and B got it too");
    if (kit.lock && (await kit.open(c, other, 0)) !== "granted")
      return no("A had a lock, and B was refused another one");
    await kit.end(c, "ROLLBACK").catch(() => {});
    await kit.end(a, "COMMIT");
    if ((await kit.open(b, mine, 0)) !== "granted") return no("A had committed, and B did not get the lock");
    if ((await kit.open(a, mine, 0)) === "granted") return no("B had the lock, and A got it too");
    await kit.end(b, "ROLLBACK");
    if ((await kit.open(a, mine, 0)) !== "granted")
      return no("B had rolled back, and A did not get the lock");
    await kit.end(a, "ROLLBACK");
    return yes("B was refused until A's end, and A until B's");
  },
};

const waitsEnd: Probe = {
  id: "waits-end",
  title: "A wait for a lock ends when its time is over",
  tried: `A has a lock; B waits ${shortMs} ms for it`,
  carries: ["transactionLocks"],
  features: "wait: ms, the default wait of 5 s",
  advice:
    'Waits end in this process only, and the server goes on waiting, then holds the lock. Use wait: "nowait" there.',
  async run({ kit, caller, key }) {
    const [a, b] = [await caller(), await caller()];
    const mine = key();
    await kit.open(a, mine, 0);
    try {
      if ((await within(endMs, kit.open(b, mine, shortMs))) === "granted")
        return no("A had the lock, and B got it after its wait");
    } catch (error) {
      if (error instanceof NoAnswer) return no(`B still waited after ${endMs / 1000} s`);
      throw error;
    }
    return yes("B waited, and was told that it is taken");
  },
};

const lockThenRead: Probe = {
  id: "lock-then-read",
  title: "What is read under a lock includes all that earlier holders have committed",
  tried:
    "B is in a READ COMMITTED transaction, and has read a row; A has the lock, changes the row, commits; B takes the lock, and reads again. The same with B's transaction opened after A's end",
  carries: ["transactionLocks", "joinedLocks"],
  features: "every check-then-write under a lock: the promise itself",
  advice: `The check reads what was true before: the limit is passed. READ COMMITTED must give each statement a new view (some products have a setting for it: docs/certify.md), and reads of a transaction must go to the server that has the lock. ${elsewhere}`,
  across: "held",
  writer: "A",
  async run({ kit, caller, key, next }) {
    const [a, b] = [await caller(), await caller()];
    const mine = key();
    if (kit.lock) {
      await kit.open(a, mine, 0);
      await kit.begin(b, "read committed");
      await kit.read(b, 3);
      const n = next();
      await kit.write(a, 3, n);
      await kit.end(a, "COMMIT");
      if ((await kit.lock(b, mine, 0)) !== "granted")
        return no("A had committed, and B did not get the lock");
      const found = await kit.read(b, 3);
      await kit.end(b, "ROLLBACK");
      if (found !== n)
        return no(`A had committed ${n}; B took the lock after that, and read ${String(found)}`);
    }
    await kit.open(a, mine, 0);
    await kit.read(a, 3);
    const n = next();
    await kit.write(a, 3, n);
    await kit.end(a, "COMMIT");
    await kit.open(b, mine, 0);
    const found = await kit.read(b, 3);
    await kit.end(b, "ROLLBACK");
    if (found !== n)
      return no(`A had committed ${n}; B opened with the lock after that, and read ${String(found)}`);
    return yes("B read what A had committed");
  },
};

const deadSession: Probe = {
  id: "dead-session",
  title: "The locks of a session that dies become free",
  tried: `A has a lock, and its connection is cut; B waits for it, ${longMs / 1000} s at most`,
  carries: ["transactionLocks"],
  features: "everything that is locked while a process may die",
  advice: "A crash would lock everybody out. Let the pooler end a server connection whose client has gone.",
  across: "held",
  async run({ kit, caller, key, next }) {
    const [a, b] = [await caller(), await caller()];
    const mine = key();
    const before = await kit.read(b, 4);
    await kit.open(a, mine, 0);
    await kit.write(a, 4, next());
    a.destroy();
    // The server may take a moment to notice, and not every kind can be waited on.
    for (const since = performance.now(); performance.now() - since < longMs; await sleep(20)) {
      if ((await kit.open(b, mine, shortMs)) !== "granted") continue;
      const found = await kit.read(b, 4);
      await kit.end(b, "ROLLBACK");
      return found === before
        ? yes("B got it, and what A had written was gone")
        : no("what A had not committed was there");
    }
    return no(`B did not get it within ${longMs / 1000} s`);
  },
};

const readCommitted: Probe = {
  id: "read-committed",
  title: "READ COMMITTED: each statement sees what was committed before it",
  tried: "A begins as READ COMMITTED and reads a row, B changes it, A reads it again",
  carries: ["transactionLocks"],
  features: "hf.transaction, whose isolation this is",
  advice:
    "The level that was asked for is not the one that is had: what is read after a lock can be older than the lock (some products have a setting for it: docs/certify.md).",
  async run({ kit, caller, next }) {
    const [a, b] = [await caller(), await caller()];
    await kit.begin(a, "read committed");
    const said = await kit.level?.(a);
    await kit.read(a, 5);
    const n = next();
    await kit.write(b, 5, n);
    const found = await kit.read(a, 5);
    await kit.end(a, "ROLLBACK");
    if (said !== undefined && said !== "read committed") return no(`the server says that it is ${said}`);
    return found === n
      ? yes("the second read was the newest")
      : no(`B had committed ${n}, and A read ${String(found)}`);
  },
};

const repeatableRead: Probe = {
  id: "repeatable-read",
  title: "REPEATABLE READ: a transaction reads the same again",
  tried: "A begins as REPEATABLE READ and reads a row, B changes it, A reads it again",
  carries: ["isolation"],
  level: "repeatable read",
  features: 'isolation: "repeatable read"',
  advice: "The level that was asked for is not the one that is had: reports are of no one moment.",
  async run({ kit, caller, next }) {
    const [a, b] = [await caller(), await caller()];
    await kit.begin(a, "repeatable read");
    const said = await kit.level?.(a);
    const first = await kit.read(a, 6);
    const wrote = await kit.write(b, 6, next());
    const second = await kit.read(a, 6);
    await kit.end(a, "ROLLBACK");
    if (said !== undefined && said !== "repeatable read" && said !== "serializable")
      return no(`the server says that it is ${said}`);
    if (second !== first) return no(`A read ${String(first)}, then ${String(second)}`);
    return yes(wrote === "busy" ? "B could not change it meanwhile" : "both reads were the same");
  },
};

const serializable: Probe = {
  id: "serializable",
  title: "SERIALIZABLE: of two that each check what the other one changes, one is refused",
  tried: "A and B begin as SERIALIZABLE and read two rows; A changes the first, B the second; both commit",
  carries: ["isolation"],
  level: "serializable",
  features: 'isolation: "serializable"',
  advice:
    "The level that was asked for is not the one that is had. Take a lock in place of it: hf.transaction({ lock }).",
  async run({ kit, caller, next }) {
    const all = [await caller(), await caller()] as const;
    for (const each of all) {
      await kit.begin(each, "serializable");
      const said = await kit.level?.(each);
      if (said !== undefined && said !== "serializable") return no(`the server says that it is ${said}`);
    }
    for (const each of all) for (const id of [7, 8]) await kit.read(each, id);
    let both = 0;
    const open = [];
    for (const [i, each] of all.entries()) {
      const wrote = await kit.write(each, 7 + i, next());
      if (wrote === "done") open.push(each);
      // So that the other one need not wait for it.
      else await kit.end(each, "ROLLBACK").catch(() => {});
    }
    for (const each of open) {
      if ((await kit.end(each, "COMMIT")) === "done") both++;
      else await kit.end(each, "ROLLBACK").catch(() => {});
    }
    return both < 2 ? yes("one of them was refused") : no("both were let through");
  },
};

const rowLock: Probe = {
  id: "row-lock",
  title: "FOR UPDATE locks a row, and nothing else",
  tried:
    "A selects a row FOR UPDATE; B tries the same with NOWAIT, then changes it with a wait, then takes another row",
  carries: ["rowLocks", "leases"],
  features: "tx.rows, tx.lockAll, leases, semaphores, lock rows",
  advice: `Row locks lock nothing here: use versions (versioned), which need none. ${elsewhere}`,
  needs: ["rows"],
  across: "held",
  writer: "A",
  async run({ kit, caller, next }) {
    const { rows } = has(kit);
    const [a, b] = [await caller(), await caller()];
    await kit.begin(a, "read committed");
    if ((await rows(a, [1], "nowait")) === "busy") return no("a row that nobody had was refused");
    await kit.begin(b, "read committed");
    if ((await rows(b, [1], "nowait")) !== "busy") return no("A had the row, and B got it too");
    await kit.end(b, "ROLLBACK");
    await kit.begin(b, "read committed");
    if ((await rows(b, [1], shortMs)) !== "busy") return no("A had the row, and B got it after a wait");
    await kit.end(b, "ROLLBACK");
    await kit.begin(b, "read committed");
    if ((await kit.write(b, 1, next())) === "done") return no("A had the row, and B changed it");
    await kit.end(b, "ROLLBACK");
    await kit.begin(b, "read committed");
    if ((await rows(b, [2], "nowait")) === "busy") return no("A had a row, and B was refused another one");
    await kit.end(b, "ROLLBACK");
    await kit.end(a, "COMMIT");
    await kit.begin(b, "read committed");
    const after = await rows(b, [1], "nowait");
    await kit.end(b, "ROLLBACK");
    return after === "busy"
      ? no("A had committed, and B did not get the row")
      : yes("B was refused until A's end");
  },
};

const skipLocked: Probe = {
  id: "skip-locked",
  title: "SKIP LOCKED leaves out rows that are taken, and locks the others",
  tried: "A has row 1; B asks for rows 1 and 2 with SKIP LOCKED; A tries for row 2",
  carries: ["rowLocks", "queues"],
  features: 'queues, tx.rows(…, { wait: "skip" })',
  advice: "Two workers would get the same job, or wait for each other. Use a queue on another server.",
  needs: ["rows"],
  across: "held",
  writer: "A",
  async run({ kit, caller }) {
    const { rows } = has(kit);
    const [a, b] = [await caller(), await caller()];
    await kit.begin(a, "read committed");
    await rows(a, [1], "nowait");
    await kit.begin(b, "read committed");
    const got = await rows(b, [1, 2], "skip");
    if (got === "busy") return no("B had to wait for the row of A");
    if (String(got) !== "2")
      return no(`A had row 1, and B got ${got.length === 0 ? "none" : `row ${got.join(" and ")}`}`);
    if ((await rows(a, [2], "nowait")) !== "busy")
      return no("B got row 2, and A got it too: it was not locked");
    return yes("B got row 2, and A was refused it");
  },
};

const compareAndSet: Probe = {
  id: "compare-and-set",
  title: "An UPDATE with a condition looks again after a wait",
  tried: "A and B both change a row on condition that it is as it was; A commits while B is at it",
  carries: ["versions", "quotas"],
  features: "versioned, quotas, stock, once",
  advice: "Both would get the last one. Take a lock first: hf.transaction({ lock }).",
  across: "at commit",
  async run({ kit, caller, atCommit }) {
    const [a, b] = [await caller(), await caller()];
    const from = (await kit.read(a, 9)) ?? 0;
    await kit.begin(a, "read committed");
    const mine = await kit.swap(a, 9, from, from + 1);
    const trying = kit.swap(b, 9, from, from + 2);
    // It is answered now, or waits for A: either way it is under way when A commits.
    await Promise.race([trying.catch(() => {}), sleep(100)]);
    const ended = await kit.end(a, "COMMIT");
    const kept = mine === "done" && ended === "done";
    const first = await trying;
    const second = first === "busy" ? await kit.swap(b, 9, from, from + 2) : first;
    const wanted = kept ? from + 1 : from + 2;
    let found = await kit.read(a, 9);
    for (const since = performance.now(); atCommit && found !== wanted; await sleep(20)) {
      if (performance.now() - since > longMs) break;
      found = await kit.read(a, 9);
    }
    if (kept !== (second === "done") && found === wanted)
      return yes(
        kept
          ? "A's was kept, and B was told that it was too late"
          : "B's was kept, and A was told so at COMMIT",
      );
    return no(`both were told yes, or B's was kept: the row went from ${from} to ${String(found)}`);
  },
};

const unique: Probe = {
  id: "unique",
  title: "Of two who insert one key, one is refused",
  tried: "A inserts a row in a transaction; B tries; A commits; B tries again. The same with a ROLLBACK of A",
  carries: ["once"],
  features: "once, external ids, migrations",
  advice:
    "What is to happen once could happen twice. The primary key must be enforced for all partitions and nodes.",
  across: "at commit",
  async run({ kit, caller, next, atCommit }) {
    const [a, b] = [await caller(), await caller()];
    if (atCommit) return insertedOnce(kit, a, b, 10_000 + next());
    for (const how of ["COMMIT", "ROLLBACK"] as const) {
      const id = 10_000 + next();
      await kit.begin(a, "read committed");
      await kit.insert(a, id);
      await kit.begin(b, "read committed");
      const early = await kit.insert(b, id);
      await kit.end(b, "ROLLBACK");
      if (early === "done") return no("A had not committed, and B inserted the same key");
      await kit.end(a, how);
      const late = await kit.insert(b, id);
      if (how === "COMMIT" && late !== "duplicate") return no("A had committed, and B inserted the same key");
      if (how === "ROLLBACK" && late !== "done") return no("A had rolled back, and B was refused");
    }
    return yes("B was refused while A's was there, and not after A had rolled back");
  },
};

/** Where nodes compare at COMMIT: both insert it, and one of them is told then. */
async function insertedOnce(kit: Kit, a: Caller, b: Caller, id: number): Promise<Seen> {
  for (const each of [a, b]) {
    await kit.begin(each, "read committed");
    await kit.insert(each, id);
  }
  const kept = [];
  for (const each of [a, b]) kept.push(await kit.end(each, "COMMIT"));
  const committed = kept.filter((each) => each === "done").length;
  return committed === 1
    ? yes("A and B inserted it, and one of them was undone at COMMIT")
    : no(`A and B inserted the same key, and ${committed === 0 ? "neither" : "both"} could commit`);
}

const savepoints: Probe = {
  id: "savepoints",
  title: "ROLLBACK TO a savepoint undoes what came after it, and no more",
  tried: "A changes a row, sets a savepoint, changes it again, rolls back to the savepoint, commits; B reads",
  carries: ["savepoints"],
  features: "nested hf.transaction, tx.lock with a wait",
  advice: "A nested transaction that failed would be kept. Do not nest: one hf.transaction for each piece.",
  async run({ kit, caller, next }) {
    const [a, b] = [await caller(), await caller()];
    const [kept, undone] = [next(), next()];
    await kit.begin(a, "read committed");
    await kit.write(a, 10, kept);
    await kit.savepoint(a, "set");
    await kit.write(a, 10, undone);
    await kit.savepoint(a, "rollback");
    const inside = await kit.read(a, 10);
    await kit.end(a, "COMMIT");
    const found = await kit.read(b, 10);
    if (inside === kept && found === kept) return yes("the first change was kept, the second was not");
    return no(
      found === undone || inside === undone
        ? "what came after the savepoint was kept"
        : `${kept} was to be kept, and ${String(found)} was`,
    );
  },
};

const savepointLocks: Probe = {
  id: "savepoint-locks",
  title: "Whether a savepoint's ROLLBACK gives back the locks that were taken after it",
  tried:
    "A sets a savepoint, takes a lock, rolls back to the savepoint; B tries for the lock; A commits; B tries again",
  carries: ["savepoints"],
  features: "nested hf.transaction({ lock }): either is well, since Holdfast counts them as given back",
  advice: "Locks that stay after the transaction keep everybody out: connect to the server itself.",
  needs: ["lock"],
  async run({ kit, caller, key }) {
    const { lock } = has(kit);
    const [a, b] = [await caller(), await caller()];
    const mine = key();
    await kit.begin(a, "read committed");
    await kit.savepoint(a, "set");
    await lock(a, mine, 0);
    if ((await kit.open(b, mine, 0)) === "granted") return no("A had the lock, and B got it too");
    await kit.savepoint(a, "rollback");
    const early = await kit.open(b, mine, 0);
    if (early === "granted") await kit.end(b, "ROLLBACK");
    await kit.end(a, "COMMIT");
    if ((await kit.open(b, mine, 0)) !== "granted") return no("A had committed, and B did not get the lock");
    await kit.end(b, "ROLLBACK");
    return yes(
      early === "granted" ? "they are given back" : "they are kept until the end of the transaction",
    );
  },
};

const sharedLocks: Probe = {
  id: "shared-locks",
  title: "Several can share a lock, and nobody has it alone meanwhile",
  tried: "A and B take a lock to share it; C tries to have it alone; A and B commit; C tries again",
  carries: ["sharedLocks"],
  features: "shared(key)",
  advice: "Take the lock alone: leave shared(…) out.",
  readsOnly: true,
  needs: ["share"],
  across: "held",
  async run({ kit, caller, key }) {
    const { share } = has(kit);
    const [a, b, c] = [await caller(), await caller(), await caller()];
    const mine = key();
    if ((await share(a, mine)) !== "granted") return no("a lock that nobody had was refused");
    if ((await share(b, mine)) !== "granted") return no("A shared the lock, and B was refused");
    await kit.begin(c, "read committed");
    if ((await has(kit).lock(c, mine, 0)) === "granted")
      return no("A and B had the lock, and C got it alone");
    await kit.end(a, "COMMIT");
    await kit.end(b, "COMMIT");
    await kit.begin(c, "read committed");
    const after = await has(kit).lock(c, mine, 0);
    return after === "granted"
      ? yes("A and B shared it, and C was refused")
      : no("nobody had the lock, and C was refused");
  },
};

const sessionStays: Probe = {
  id: "session-stays",
  title: "A connection stays with one session of the server",
  tried:
    "A asks for the id of its session, twice in a row, while B is in a transaction and while it is not; five times",
  carries: ["sessionLocks"],
  features: "hf.hold, SERIALIZABLE with a lock, LISTEN, SET",
  advice:
    "A pooler lends sessions out per transaction. Connect to the server itself for hf.hold, or use leases, which work through it.",
  readsOnly: true,
  needs: ["id"],
  async run({ kit, caller }) {
    const { id } = has(kit);
    const [a, b] = [await caller(), await caller()];
    for (let round = 0; round < 5; round++) {
      const before = [await id(a), await id(a)];
      await kit.begin(b, "read committed");
      const inside = [await id(b), await id(b)];
      const asked = id(a);
      // It may have to wait for B's end, where a pooler has no other session to lend.
      await Promise.race([asked.catch(() => {}), sleep(1000)]);
      await kit.end(b, "ROLLBACK");
      if (inside[0] !== inside[1]) return no("B's session changed in the middle of its transaction");
      if (new Set([...before, await asked]).size > 1 || inside[0] === before[0])
        return no("A's session changed: a pooler lends sessions out");
    }
    return yes("A kept its own");
  },
};

const sessionLock: Probe = {
  id: "session-lock",
  title: "A lock of a session stays with it through transactions, until it is given back",
  tried:
    "A takes a lock of its session, and commits a transaction; B tries for it; A gives it back; B tries again",
  carries: ["sessionLocks"],
  features: "hf.hold, SERIALIZABLE with a lock",
  advice: "Use a lease (hf.lease), or a lock of a transaction.",
  readsOnly: true,
  needs: ["take", "give"],
  across: "held",
  async run({ kit, caller, key, verdictOf }) {
    const stays = verdictOf("session-stays");
    // It would be left behind on a session that others get next.
    if (stays !== undefined && stays !== "holds") return no("not tried, since sessions are lent out");
    const { take, give } = has(kit);
    const [a, b] = [await caller(), await caller()];
    const mine = key();
    if (!(await take(a, mine))) return no("a lock that nobody had was refused");
    await kit.begin(a, "read committed");
    await kit.end(a, "COMMIT");
    if (await take(b, mine)) {
      await give(b, mine);
      return no("A had the lock, and B got it too");
    }
    if (!(await give(a, mine))) return no("A had the lock, and the server says that it had not");
    if (!(await take(b, mine))) return no("A had given it back, and B was refused");
    await give(b, mine);
    return yes("B was refused until A gave it back");
  },
};

const notify: Probe = {
  id: "notify",
  title: "A message of one session reaches another",
  tried: "A says LISTEN, B says NOTIFY",
  carries: ["wake"],
  features:
    "how soon workers of queues, and those who wait for a lease, begin; nothing is less exact without it",
  advice: "They look again and again, and begin later. Let workers connect to the server itself.",
  readsOnly: true,
  needs: ["message"],
  async run({ kit, server, verdictOf }) {
    const stays = verdictOf("session-stays");
    if (stays !== undefined && stays !== "holds") return no("not tried, since sessions are lent out");
    return (await has(kit).message(server)) ? yes("it arrived") : no("it was sent, and did not arrive");
  },
};

const procedures: Probe = {
  id: "procedures",
  title: "Routines can be made, and answer",
  tried: "makes one that adds 1, and calls it",
  carries: ["quotas", "queues"],
  features: "quotas, stock, queues, schedules, and fewer round trips for locks that are rows",
  advice: "hf.migrate() will fail for these. Locks, versions and once do without.",
  needs: ["routine"],
  async run({ kit, caller }) {
    const answer = await has(kit).routine(await caller());
    return answer === 42 ? yes("it did") : no(`it answered ${answer} in place of 42`);
  },
};

const serverDeadline: Probe = {
  id: "server-deadline",
  title: "The server ends a transaction that outlives its limit",
  tried: `A has a lock in a transaction with a limit of ${shortMs} ms, and does nothing; B waits for the lock, ${longMs / 1000} s at most`,
  carries: ["serverDeadline"],
  features: "deadline: a frozen process does not keep the others out for good",
  advice:
    "A frozen process keeps its locks until somebody ends it: set a limit for idle transactions on the server.",
  needs: ["limited"],
  async run({ kit, caller, key }) {
    const [a, b] = [await caller(), await caller()];
    const mine = key();
    await has(kit).limited(a, mine, shortMs);
    const got = await kit.open(b, mine, longMs);
    if (got !== "granted") return no(`A still had it after ${longMs / 1000} s`);
    await kit.end(b, "ROLLBACK");
    const alive = await kit.read(a, 1).then(
      () => true,
      () => false,
    );
    return alive
      ? no("B got the lock, and A's transaction went on")
      : yes("A's was ended, and B got the lock");
  },
};

const commitOutcome: Probe = {
  id: "commit-outcome",
  title: "How a transaction ended can be asked for later",
  tried: "A commits one and rolls another one back; B asks for both",
  carries: ["commitOutcome"],
  features: "a COMMIT whose answer was lost: returned or run again, in place of HF_COMMIT_UNKNOWN",
  advice: "Give such calls an id (once), so that they can be run again.",
  needs: ["identity", "outcome"],
  async run({ kit, caller, next }) {
    const { identity, outcome } = has(kit);
    const [a, b] = [await caller(), await caller()];
    for (const [how, expected] of [
      ["COMMIT", "committed"],
      ["ROLLBACK", "aborted"],
    ] as const) {
      await kit.begin(a, "read committed");
      const name = await identity(a);
      await kit.write(a, 11, next());
      await kit.end(a, how);
      const said = await outcome(b, name);
      if (said !== expected) return no(`after ${how} the server said "${said}"`);
    }
    return yes("both were told as they were");
  },
};

const clock: Probe = {
  id: "clock",
  title: "The server has one clock, which goes forward",
  tried: "A and B ask for the time in turn, twelve times",
  carries: ["leases"],
  features: "leases, semaphores, schedules, windows of quotas",
  advice: "Two nodes with clocks of their own answer: set them by NTP, or connect to one of them.",
  readsOnly: true,
  across: "at commit",
  async run({ kit, caller }) {
    const [a, b] = [await caller(), await caller()];
    const times: number[] = [];
    for (let i = 0; i < 12; i++) times.push(await kit.clock(i % 2 === 0 ? a : b));
    const back = times.findIndex((time, i) => i > 0 && time < (times[i - 1] ?? 0));
    if (times.some((time) => !Number.isFinite(time))) return unknown("the server did not tell the time");
    if (back > 0) return no(`it went back by ${Math.round((times[back - 1] ?? 0) - (times[back] ?? 0))} ms`);
    return yes("it did not go back");
  },
};

const history = (
  id: string,
  what: string,
  tried: string,
  carries: Probe["carries"],
  run: (ground: Ground) => Promise<Seen>,
): Probe => ({
  id,
  title: `A history of ${what} can be explained by one call after the other`,
  tried,
  carries,
  features: "everything that is counted, bought or booked",
  advice: `What was seen by several sessions at once cannot have happened in any order: see the lines above for the cause. ${elsewhere}`,
  across: "at commit",
  run,
});

/** In the order in which they are told. */
export const probes: readonly Probe[] = [
  committed,
  transactions,
  lockExcludes,
  waitsEnd,
  lockThenRead,
  deadSession,
  sharedLocks,
  sessionStays,
  sessionLock,
  rowLock,
  skipLocked,
  compareAndSet,
  unique,
  readCommitted,
  repeatableRead,
  serializable,
  savepoints,
  savepointLocks,
  serverDeadline,
  commitOutcome,
  clock,
  notify,
  procedures,
  history(
    "history-counter",
    "a counter under a lock",
    "four sessions take from a limit under a lock, and read it; the checker looks for an order that explains all answers",
    ["transactionLocks"],
    counterHistory,
  ),
  history(
    "history-register",
    "a register by compare-and-set",
    "four sessions change a row on condition that it is as they read it; the checker looks for an order that explains all answers",
    ["versions"],
    registerHistory,
  ),
];

/** Of a kind of server that has deliberately nothing for it. */
export const gap = ({ id, needs }: Probe, kit: Kit): Seen | undefined => {
  const why = kit.gaps[id];
  if (why !== undefined) return absent(why);
  return needs?.some((part) => kit[part] === undefined)
    ? absent("there is nothing of the kind here")
    : undefined;
};

/** Whether Holdfast says that it has any of what stands or falls with it. */
export const isClaimed = ({ carries, level }: Probe, capabilities: Capabilities | undefined): boolean =>
  !capabilities ||
  carries.some((name) => {
    if (name === "isolation" && level !== undefined) return capabilities.isolation.includes(level);
    const value: unknown = capabilities[name];
    return !(typeof value === "object" && value !== null && "why" in value);
  });
