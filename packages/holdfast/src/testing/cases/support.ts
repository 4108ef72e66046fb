import assert from "node:assert/strict";
import { type Support, isSupported } from "../../seam/capabilities.ts";
import { LockTimeoutError, UnsupportedError } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import { type ConformanceCase, type Ground, execute } from "../ground.ts";

export { assert, sql };

type Run = ConformanceCase["run"];

/** A suite's cases, named. */
export function suite(name: string, cases: Readonly<Record<string, Run>>): ConformanceCase[] {
  return Object.entries(cases).map(([title, run]) => ({ suite: name, name: title, run }));
}

/** Runs where the capability is there; elsewhere asserts that asking for it throws its reason. */
export function where<T>(
  support: (ground: Ground) => Support<T>,
  run: Run,
  refused: (ground: Ground) => Promise<unknown>,
): Run {
  return async (ground) => {
    const found = support(ground);
    if (isSupported(found)) return run(ground);
    await assert.rejects(refused(ground), (error: unknown) => {
      assert.ok(error instanceof UnsupportedError, `expected UnsupportedError, got ${String(error)}`);
      assert.match(error.message, new RegExp(escape(found.why)));
      return true;
    });
  };
}

function escape(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}

/** Runs where a nested transaction that fails is undone alone; elsewhere the whole one says why it cannot go on. */
export function nested(run: Run): Run {
  return where(
    ({ capabilities }) => capabilities.savepoints,
    run,
    ({ hf }) =>
      hf.transaction(async (tx) => {
        const failing = tx.transaction(async () => {
          throw new Error("nested");
        });
        await assert.rejects(failing, /nested/);
      }),
  );
}

/** A signal between two bodies: `open()` lets everybody pass who waits for `opened`. */
export class TestGate {
  readonly opened: Promise<void>;
  open!: () => void;
  constructor() {
    this.opened = new Promise((resolve) => (this.open = resolve));
  }
}

/** A table of counters: portable, made outside of the case's transactions. */
export async function table({ site, fresh }: Ground): Promise<string> {
  const name = fresh.replaceAll("-", "_");
  await execute(site, sql`CREATE TABLE ${sql.id(name)} (k varchar(40) NOT NULL, n integer NOT NULL)`);
  return name;
}

/** Runs `body` while somebody else holds the lock that `hold` takes. Both have ended when it returns. */
export async function during<T>(
  hold: (inside: () => Promise<void>) => Promise<unknown>,
  body: () => Promise<T>,
): Promise<T> {
  const [held, done] = [new TestGate(), new TestGate()];
  const holding = hold(async () => {
    held.open();
    await done.opened;
  });
  // If the holder fails before it holds, its error is the one to see.
  const failed = holding.then(() => undefined);
  try {
    await Promise.race([held.opened, failed.then(() => held.opened)]);
    return await body();
  } finally {
    done.open();
    await holding;
  }
}

/**
 * Returns what a call is refused with. Who holds the lock is part of it only if the server tells that within a second: so it
 * asks again while `tells` and nobody is named.
 */
export async function refusal(ask: () => Promise<unknown>, tells: boolean): Promise<unknown> {
  for (let left = 10; ; left--) {
    const error = await ask();
    const isNamed = error instanceof LockTimeoutError && error.holders.length > 0;
    if (isNamed || !tells || left === 0) return error;
  }
}
