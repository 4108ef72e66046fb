import { getEventListeners } from "node:events";
import { setImmediate as turn } from "node:timers/promises";
import * as fc from "fast-check";
import { describe, expect, inject, test } from "vitest";
import { Turns, unlessAborted } from "../../packages/holdfast/src/waiting/turns.ts";

fc.configureGlobal({ seed: inject("seed"), numRuns: 200 });

describe("Queue", () => {
  test("lets in one after the other, as they came", async () => {
    const queue = new Turns();
    const log: string[] = [];
    await Promise.all(
      ["a", "b", "c"].map((name) =>
        queue.run(async () => {
          log.push(`${name} in`);
          await turn();
          log.push(`${name} out`);
        }),
      ),
    );
    expect(log).toEqual(["a in", "a out", "b in", "b out", "c in", "c out"]);
  });

  test("lets the next one in after an error, and passes on what a body returns", async () => {
    const queue = new Turns();
    const failing = queue.run(async () => {
      throw new Error("a");
    });
    const next = queue.run(async () => 2);
    await expect(failing).rejects.toThrow("a");
    expect(await next).toBe(2);
  });

  test("lets in nobody whose signal has aborted, free or not", async () => {
    const queue = new Turns();
    const reason = new Error("no longer wanted");
    await expect(queue.enter(AbortSignal.abort(reason))).rejects.toBe(reason);
    const leave = await queue.enter();
    await expect(queue.enter(AbortSignal.abort(reason))).rejects.toBe(reason);
    leave();
    (await queue.enter())();
  });

  test("an abort after the entrance changes nothing", async () => {
    const queue = new Turns();
    const controller = new AbortController();
    const leave = await queue.enter();
    const second = queue.enter(controller.signal);
    leave();
    const leaveSecond = await second;
    // A signal lives longer than a place: what it keeps would never be let go.
    expect(getEventListeners(controller.signal, "abort")).toEqual([]);
    controller.abort();
    let third = false;
    const waiting = queue.enter().then((leaveThird) => {
      third = true;
      leaveThird();
    });
    await turn();
    expect(third).toBe(false);
    leaveSecond();
    await waiting;
  });

  /** What happens to a queue: somebody comes, somebody in line gives up, somebody inside leaves (perhaps twice). */
  const step = fc.record({
    what: fc.constantFrom("come", "come", "give up", "leave", "leave twice"),
    who: fc.nat(20),
  });

  test("never has more inside than places, none free while somebody waits, and keeps the order", async () => {
    await fc.assert(
      fc.asyncProperty(
        fc.integer({ min: 1, max: 3 }),
        fc.array(step, { maxLength: 40 }),
        async (places, steps) => {
          const queue = new Turns(places);
          const inside = new Map<number, () => void>();
          // What must be true, kept beside what is.
          const line: { name: number; abort: AbortController }[] = [];
          const expected = new Set<number>();
          const gaveUp: number[] = [];
          let came = 0;
          const admit = () => {
            while (expected.size < places && line.length > 0)
              expected.add((line.shift() as { name: number }).name);
          };
          for (const { what, who } of steps) {
            if (what === "come") {
              const [name, abort] = [came++, new AbortController()];
              line.push({ name, abort });
              queue.enter(abort.signal).then(
                (leave) => inside.set(name, leave),
                () => gaveUp.push(name),
              );
            } else if (what === "give up" && line.length > 0) {
              const [gone] = line.splice(who % line.length, 1);
              gone?.abort.abort();
            } else if (what.startsWith("leave") && expected.size > 0) {
              const name = [...expected][who % expected.size] as number;
              const leave = inside.get(name);
              leave?.();
              if (what === "leave twice") leave?.();
              inside.delete(name);
              expected.delete(name);
            }
            admit();
            await turn();
            expect([...inside.keys()]).toEqual([...expected]);
            expect(inside.size + line.length + gaveUp.length).toBeLessThanOrEqual(came);
          }
        },
      ),
    );
  });
});

describe("unlessAborted", () => {
  test("brings what was waited for", async () => {
    const given: number[] = [];
    const giveBack = (late: number) => given.push(late);
    expect(await unlessAborted(Promise.resolve(1), undefined, giveBack)).toBe(1);
    const controller = new AbortController();
    expect(await unlessAborted(Promise.resolve(2), controller.signal, giveBack)).toBe(2);
    expect(getEventListeners(controller.signal, "abort")).toEqual([]);
    controller.abort();
    await turn();
    expect(given).toEqual([]);
  });

  test("hands back what comes too late", async () => {
    const given: number[] = [];
    const controller = new AbortController();
    const late = Promise.withResolvers<number>();
    const waiting = unlessAborted(late.promise, controller.signal, (value) => given.push(value));
    const reason = new Error("enough");
    controller.abort(reason);
    await expect(waiting).rejects.toBe(reason);
    late.resolve(3);
    await turn();
    expect(given).toEqual([3]);
  });

  test("hands back what was there when nobody wanted it any more", async () => {
    const given: number[] = [];
    const waiting = unlessAborted(Promise.resolve(4), AbortSignal.abort(), (value) => given.push(value));
    const outcome = await waiting.then(
      (value) => value,
      () => "aborted",
    );
    await turn();
    // Either the caller has it or it was handed back: never both, never neither.
    expect([outcome, ...given]).toContain(4);
    expect(given.length + (outcome === 4 ? 1 : 0)).toBe(1);
  });

  test("lets an error of its own through, and none that comes too late", async () => {
    const controller = new AbortController();
    const failing = unlessAborted(Promise.reject(new Error("full")), controller.signal, () => {});
    await expect(failing).rejects.toThrow("full");
    const late = Promise.withResolvers<number>();
    const waiting = unlessAborted(late.promise, controller.signal, () => {});
    controller.abort(new Error("enough"));
    await expect(waiting).rejects.toThrow("enough");
    // Not handled it would end the process.
    late.reject(new Error("late"));
    await turn();
  });
});
