import { describe, expect, test } from "vitest";
import { Notifier } from "../../packages/holdfast/src/batch/notifier.ts";
import { eventually } from "../harness/wait.ts";

/** A server as far as a notifier knows it: what is sent comes back, if it does, to whoever listens. */
function server(options: { readonly deaf?: boolean; readonly refuses?: boolean } = {}) {
  const listeners = new Set<(payload: string) => void>();
  const state = { listeners, opened: 0, silent: options.deaf ?? false };
  const home = {
    database: {
      engine: {
        leases: {
          channel: "c",
          async notify(_: unknown, payload: string) {
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
  return { state, notifier: new Notifier(home as never, "leases") };
}

const never = new AbortController().signal;
const long = 60_000;

describe("Ear", () => {
  test("wakes those who wait for that resource, and nobody else", async () => {
    const { notifier } = server();
    const [a, b] = [notifier.ear("a"), notifier.ear("b")];
    const woken: string[] = [];
    const waiting = a.sleep(long, never).then(() => woken.push("a"));
    const stop = new AbortController();
    const other = b.sleep(long, stop.signal);
    notifier.notify("a");
    await waiting;
    expect(woken).toEqual(["a"]);
    stop.abort(new Error("enough"));
    await expect(other).rejects.toThrow("enough");
  });

  test("does not sleep through what rang just before", async () => {
    const { notifier } = server();
    const ear = notifier.ear("a");
    notifier.notify("a");
    await ear.sleep(long, never);
    expect(ear.rung).toBe(true);
    notifier.forget("a", ear);
    ear.rung = false;
    notifier.notify("a");
    expect(ear.rung).toBe(false);
  });
});

describe("Bell", () => {
  test("believes what has come back to it, and stops when nobody waits", async () => {
    const { notifier, state } = server();
    expect(notifier.hears()).toBe(false);
    expect(state.opened).toBe(0);
    const [leave, leaveToo] = [notifier.listen(), notifier.listen()];
    await eventually(() => notifier.hears());
    expect(state.opened).toBe(1);
    const ear = notifier.ear("a");
    const waiting = ear.sleep(long, never);
    for (const wake of state.listeners) wake("a");
    await waiting;
    leave();
    leave();
    leaveToo();
    await eventually(() => state.listeners.size === 0);
    expect(notifier.hears()).toBe(false);
    // And begins again with the next one who waits.
    const again = notifier.listen();
    await eventually(() => notifier.hears());
    expect(state.opened).toBe(2);
    again();
    await notifier.close();
    expect(state.listeners.size).toBe(0);
  });

  test.each([{ deaf: true }, { refuses: true }])(
    "does without it where nothing is heard: %o",
    async (options) => {
      const { notifier, state } = server(options);
      const leave = notifier.listen();
      await eventually(() => state.opened === 1 && state.listeners.size === 0);
      expect(notifier.hears()).toBe(false);
      // Not again and again: a pooler stays a pooler.
      notifier.listen()();
      expect(state.opened).toBe(1);
      leave();
      await notifier.close();
    },
  );

  test("opens nothing once it is closed", async () => {
    const { notifier, state } = server();
    await notifier.close();
    notifier.listen()();
    expect(notifier.hears()).toBe(false);
    expect(state.opened).toBe(0);
  });
});
