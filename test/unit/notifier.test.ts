import { describe, expect, test } from "vitest";
import { Notifier } from "../../packages/holdfast/src/batch/notifier.ts";
import { eventually } from "../harness/wait.ts";

/** A server as far as a bell knows it: what is sent comes back, if it does, to whoever listens. */
function server(options: { readonly deaf?: boolean; readonly refuses?: boolean } = {}) {
  const listeners = new Set<(payload: string) => void>();
  const state = { listeners, opened: 0, silent: options.deaf ?? false };
  const home = {
    database: {
      engine: {
        leases: {
          channel: "c",
          async ring(_: unknown, payload: string) {
            if (!state.silent) for (const wake of listeners) wake(payload);
          },
        },
      },
      connect: async () => ({
        connection: { lost: new AbortController().signal },
        native: undefined,
        release: () => {},
      }),
      async listen(_: string, wake: (payload: string) => void, signal: AbortSignal) {
        state.opened++;
        if (options.refuses) throw new Error("no connection to spare");
        listeners.add(wake);
        signal.addEventListener("abort", () => listeners.delete(wake));
      },
    },
    known: () => ({ wake: true }),
  };
  return { state, bell: new Notifier(home as never, "leases") };
}

const never = new AbortController().signal;
const long = 60_000;

describe("Ear", () => {
  test("wakes those who wait for that resource, and nobody else", async () => {
    const { bell } = server();
    const [a, b] = [bell.ear("a"), bell.ear("b")];
    const woken: string[] = [];
    const waiting = a.sleep(long, never).then(() => woken.push("a"));
    const stop = new AbortController();
    const other = b.sleep(long, stop.signal);
    bell.notify("a");
    await waiting;
    expect(woken).toEqual(["a"]);
    stop.abort(new Error("enough"));
    await expect(other).rejects.toThrow("enough");
  });

  test("does not sleep through what rang just before", async () => {
    const { bell } = server();
    const ear = bell.ear("a");
    bell.notify("a");
    await ear.sleep(long, never);
    expect(ear.rung).toBe(true);
    bell.forget("a", ear);
    ear.rung = false;
    bell.notify("a");
    expect(ear.rung).toBe(false);
  });
});

describe("Bell", () => {
  test("believes what has come back to it, and stops when nobody waits", async () => {
    const { bell, state } = server();
    expect(bell.hears()).toBe(false);
    expect(state.opened).toBe(0);
    const [leave, leaveToo] = [bell.listen(), bell.listen()];
    await eventually(() => bell.hears());
    expect(state.opened).toBe(1);
    const ear = bell.ear("a");
    const waiting = ear.sleep(long, never);
    for (const wake of state.listeners) wake("a");
    await waiting;
    leave();
    leave();
    leaveToo();
    await eventually(() => state.listeners.size === 0);
    expect(bell.hears()).toBe(false);
    // And begins again with the next one who waits.
    const again = bell.listen();
    await eventually(() => bell.hears());
    expect(state.opened).toBe(2);
    again();
    await bell.close();
    expect(state.listeners.size).toBe(0);
  });

  test.each([{ deaf: true }, { refuses: true }])(
    "does without it where nothing is heard: %o",
    async (options) => {
      const { bell, state } = server(options);
      const leave = bell.listen();
      await eventually(() => state.opened === 1 && state.listeners.size === 0);
      expect(bell.hears()).toBe(false);
      // Not again and again: a pooler stays a pooler.
      bell.listen()();
      expect(state.opened).toBe(1);
      leave();
      await bell.close();
    },
  );

  test("opens nothing once it is closed", async () => {
    const { bell, state } = server();
    await bell.close();
    bell.listen()();
    expect(bell.hears()).toBe(false);
    expect(state.opened).toBe(0);
  });
});
