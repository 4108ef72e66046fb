import { setImmediate as turn } from "node:timers/promises";
import { expect, test } from "vitest";
import { canonical, key } from "../../packages/holdfast/src/seam/key.ts";
import { Refused } from "../../packages/holdfast/src/waiting/refused.ts";
import { OneConnection } from "../../packages/holdfast/src/waiting/one-connection.ts";

const [a, b] = [canonical(key("a")), canonical(key("b"))];
const enough = 60_000;
const use = "transaction";

test("one client has one door, however often it is asked for", async () => {
  const client = {};
  expect(OneConnection.of(client)).toBe(OneConnection.of(client));
  expect(OneConnection.of({})).not.toBe(OneConnection.of(client));
});

test("one at a time, as they came, whatever they lock", async () => {
  const door = new OneConnection();
  const log: string[] = [];
  const visit = async (name: string, locks = a) => {
    const leave = await door.enter({ use, locks, wait: enough });
    log.push(`${name} in`);
    await turn();
    log.push(`${name} out`);
    leave();
  };
  await Promise.all([visit("1"), visit("2", b), visit("3", []), visit("4")]);
  expect(log).toEqual(["1 in", "1 out", "2 in", "2 out", "3 in", "3 out", "4 in", "4 out"]);
});

test("who is not to wait is refused only where a lock is wanted that somebody has or waits for", async () => {
  const door = new OneConnection();
  const leave = await door.enter({ use, locks: a, wait: enough });
  const refused = await door
    .enter({ use, locks: [...a, ...b], wait: "nowait" })
    .catch((error: unknown) => error);
  expect(refused).toBeInstanceOf(Refused);
  expect(refused).toMatchObject({ reason: "busy" });
  // For another lock, or none, the door itself is in the way: that is no lock, and worth waiting for.
  const other = door.enter({ use, locks: b, wait: "nowait" });
  const none = door.enter({ use, locks: [], wait: "nowait" });
  // In line counts as well.
  await expect(door.enter({ use, locks: b, wait: "nowait" })).rejects.toBeInstanceOf(Refused);
  leave();
  (await other)();
  (await none)();
  // What was refused left no trace.
  (await door.enter({ use, locks: [...a, ...b], wait: "nowait" }))();
});

test("a wait for a lock ends when it is over, and its place in the line with it", async () => {
  const door = new OneConnection();
  const leave = await door.enter({ use, locks: a, wait: enough });
  const refused = await door.enter({ use, locks: a, wait: 5 }).catch((error: unknown) => error);
  expect(refused).toMatchObject({ reason: "timeout", waitedMs: 5 });
  expect(refused).toBeInstanceOf(Refused);
  leave();
  (await door.enter({ use, locks: a, wait: "nowait" }))();
});

test("an abort ends the wait with its reason", async () => {
  const door = new OneConnection();
  const leave = await door.enter({ use, locks: a, wait: enough });
  const reason = new Error("enough");
  for (const locks of [a, b]) {
    const controller = new AbortController();
    const waiting = door.enter({ use, locks, wait: enough, signal: controller.signal });
    controller.abort(reason);
    await expect(waiting).rejects.toBe(reason);
  }
  await expect(door.enter({ use, locks: b, wait: enough, signal: AbortSignal.abort(reason) })).rejects.toBe(
    reason,
  );
  leave();
  (await door.enter({ use, locks: [...a, ...b], wait: "nowait" }))();
});

test("leaving twice is leaving once", async () => {
  const door = new OneConnection();
  const leave = await door.enter({ use, locks: a, wait: enough });
  const second = door.enter({ use, locks: a, wait: enough });
  leave();
  leave();
  const leaveSecond = await second;
  // The second one is inside with its lock, whatever the first one did.
  const controller = new AbortController();
  const third = door
    .enter({ use, locks: a, wait: "nowait", signal: controller.signal })
    .catch((error: unknown) => error);
  await turn();
  controller.abort();
  expect(await third).toBeInstanceOf(Refused);
  leaveSecond();
});
