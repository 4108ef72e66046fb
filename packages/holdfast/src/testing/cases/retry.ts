import { LockNotAvailableError, LockTimeoutError } from "../../seam/errors.ts";
import { key } from "../../seam/key.ts";
import type { Transaction } from "../../transaction/scope.ts";
import type { Ground } from "../ground.ts";
import { assert, during, suite } from "./support.ts";

const patient = { attempts: 200, baseMs: 5, maxMs: 20 };

/** Where everybody's lock is the same, the body has it already. */
const oneForAll = ({ capabilities }: Ground) => capabilities.granularity === "database";

export const retryCases = suite("retry", {
  "runs the body again after a wait in it that was over, if it is to": async (ground) => {
    if (oneForAll(ground)) return;
    const { hf, other, fresh } = ground;
    const lock = key("retry", fresh);
    let attempts = 0;
    let release!: () => void;
    const enough = new Promise<void>((resolve) => (release = resolve));
    const value = await during(
      (inside) => other.transaction({ lock }, async () => Promise.race([inside(), enough])),
      () =>
        hf.transaction({ retry: { ...patient, on: ["lock-timeout"] } }, async (tx) => {
          if (++attempts === 3) release();
          await tx.lock(lock, { wait: attempts < 3 ? 20 : 5000 });
          return attempts;
        }),
    );
    assert.ok(value >= 3, String(value));
  },

  "does not, if it is not to, nor what was not to wait": async (ground) => {
    if (oneForAll(ground)) return;
    const { hf, other, fresh } = ground;
    const lock = key("retry", fresh);
    await during(
      (inside) => other.transaction({ lock }, inside),
      async () => {
        let attempts = 0;
        const body = (wait: number | "nowait") => async (tx: Transaction<unknown>) => {
          attempts++;
          await tx.lock(lock, { wait });
        };
        await assert.rejects(hf.transaction(body(20)), LockTimeoutError);
        assert.equal(attempts, 1);
        await assert.rejects(
          hf.transaction({ retry: { ...patient, on: ["lock-timeout"] } }, body("nowait")),
          LockNotAvailableError,
        );
        assert.equal(attempts, 2);
      },
    );
  },

  "runs work with a transaction of the client's own again": async (ground) => {
    const { hf, site } = ground;
    const seen: number[] = [];
    const failing = Object.assign(new Error("made up"), { code: "made up" });
    await assert.rejects(
      hf.retry(async (attempt) => {
        seen.push(attempt);
        throw failing;
      }),
      (error) => error === failing,
    );
    assert.deepEqual(seen, [1]);
    assert.equal(await hf.retry(() => site.ownTransaction(async () => "done")), "done");
  },
});
