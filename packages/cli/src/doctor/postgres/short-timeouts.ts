/** Limits of time that end what Holdfast does before it is done. */
import type { Check, Finding } from "../check.ts";
import type { PostgresPatient } from "./patient.ts";
import { forRole, milliseconds, shown } from "./settings.ts";

interface Limit {
  readonly setting: string;
  readonly leastMs: number;
  readonly recommended: string;
  readonly why: string;
}

/** Calls wait for locks for 5 s unless told otherwise. */
const limits: readonly Limit[] = [
  {
    setting: "statement_timeout",
    leastMs: 5000,
    recommended: "30s",
    why: "A wait for a lock is a statement: it ends as 57014 before Holdfast's own limit (5 s, unless told otherwise), and is taken for a slow query. (hf.migrate raises it for itself.)",
  },
  {
    setting: "transaction_timeout",
    leastMs: 5000,
    recommended: "60s",
    why: "It ends the session, not only the transaction, while a call still waits for its lock (5 s, unless told otherwise). (hf.migrate raises it for itself.)",
  },
  {
    setting: "idle_in_transaction_session_timeout",
    leastMs: 1000,
    recommended: "30s",
    why: "A pause of the application between two statements, as garbage collection makes, ends the session in the middle of a transaction.",
  },
];

export const shortTimeouts: Check<PostgresPatient> = {
  id: "short-timeouts",
  title: "a limit of time is shorter than what Holdfast does",
  async run(patient): Promise<readonly Finding[]> {
    const settings = await patient.settings();
    return limits.flatMap(({ setting, leastMs, recommended, why }): Finding[] => {
      const found = settings.get(setting);
      const ms = milliseconds(found);
      if (ms === 0 || ms >= leastMs) return [];
      return [
        {
          severity: "warning",
          what: `${setting} is ${shown(ms)}`,
          why,
          fix: forRole(patient, found, recommended),
        },
      ];
    });
  },
};
