/** The thread of one actor: each of its statements sleeps until it has the turn. */
import { inspect } from "node:util";
import { parentPort, workerData } from "node:worker_threads";
import { message } from "../../seam/errors.ts";
import type {
  HookedCall,
  StatementHook,
  HookedStatements,
  HookStatements,
} from "../../seam/statement-hook.ts";
import { callSites } from "../../context/call-site.ts";
import { type Asked, type Given, type Said, type Verdict, flag, thrown, verdict } from "./verdict.ts";

/** `load` is called when the clients that it loads are held back. */
export async function serve(engines: readonly HookStatements[], load: () => Promise<object>): Promise<void> {
  const { name, args, flags } = workerData as Given;
  const turnstile = new Turnstile(flags);
  turnstile.gated = engines.map((hookStatements) => hookStatements(turnstile));
  try {
    const actor = ((await load()) as Record<string, unknown>)[name];
    if (typeof actor !== "function") throw new TypeError(`it exports no function ${name}`);
    parentPort?.on("message", (asked: Asked) => {
      if (asked === "run") void run(actor as (...args: unknown[]) => unknown, args, turnstile);
      else say({ kind: "idle" });
    });
    say({ kind: "ready", clients: turnstile.gated.flatMap(({ clients }) => clients) });
  } catch (error) {
    say({ kind: "failed", error: thrown(error) });
  }
}

async function run(
  actor: (...args: unknown[]) => unknown,
  args: readonly unknown[],
  turnstile: Turnstile,
): Promise<void> {
  let end: { value: unknown } | { thrown: ReturnType<typeof thrown> };
  try {
    end = { value: await actor(...structuredClone(args)) };
  } catch (error) {
    end = { thrown: thrown(error) };
  }
  for (const each of turnstile.gated) each.rollBack();
  const libraries = [...turnstile.libraries];
  try {
    say({ kind: "done", ...end, libraries });
  } catch {
    // It holds what cannot leave its thread: a function, a connection.
    say({ kind: "done", value: inspect((end as { value: unknown }).value), libraries });
  }
}

function say(said: Said): void {
  // oxlint-disable-next-line unicorn/require-post-message-target-origin -- it is a thread's port, not a window's.
  parentPort?.postMessage(said);
}

/** Rows that are told: nobody looks at more. */
const most = 50;
/** Between tries for a lock, where nobody holds back. */
const pauseMs = 2;

class Turnstile implements StatementHook {
  readonly #flags: Given["flags"];
  readonly #nap = new Int32Array(new SharedArrayBuffer(4));
  readonly libraries = new Set<string>();
  gated: readonly HookedStatements[] = [];

  constructor(flags: Given["flags"]) {
    this.#flags = flags;
  }

  pass<T>(call: HookedCall<T>): T {
    this.libraries.add(call.library);
    if (Atomics.load(this.#flags, flag.holding) === 0) return this.#patiently(call);
    const { place } = callSites.here(call.above);
    const free = this.#ask({ kind: "held", text: call.text, place }) === verdict.free;
    return free ? this.#patiently(call) : this.#inTurn(call);
  }

  #inTurn<T>(call: HookedCall<T>): T {
    for (;;) {
      let result: T;
      try {
        result = call.execute();
      } catch (error) {
        const patience = call.patience(error);
        if (patience && this.#ask({ kind: "locked" }) === verdict.again) continue;
        this.#answered([], { error: message(error), locked: patience !== undefined });
        throw error;
      }
      this.#answered(call.rows(result).slice(0, most));
      return result;
    }
  }

  #answered(
    rows: readonly (readonly string[])[],
    error: { readonly error?: string; readonly locked?: boolean } = {},
  ): void {
    const inside = this.gated.some((each) => each.inTransaction());
    say({ kind: "answered", rows, ...error, inside });
  }

  /** As it would be by itself. */
  #patiently<T>(call: HookedCall<T>): T {
    const begun = performance.now();
    for (;;)
      try {
        return call.execute();
      } catch (error) {
        if (performance.now() - begun >= (call.patience(error) ?? 0)) throw error;
        Atomics.wait(this.#nap, 0, 0, pauseMs);
      }
  }

  #ask(said: Said): Verdict {
    say(said);
    for (;;) {
      // It may be woken without one: for the last verdict, which it had found before it fell asleep.
      Atomics.wait(this.#flags, flag.verdict, verdict.none);
      const given = Atomics.exchange(this.#flags, flag.verdict, verdict.none) as Verdict;
      if (given !== verdict.none) return given;
    }
  }
}
