/** Leases whose holder is gone. */
import { age } from "../terminal.ts";
import { shown } from "../text.ts";
import { type Check, findings, orAbsent } from "./check.ts";
import type { Patient } from "./patient.ts";

/**
 * `select` gives name, holder, fence and ms (for how long it has been over) of those that ran out more than five seconds
 * ago, and were never given back.
 */
export function deadLeases<P extends Patient>(select: (table: string) => string): Check<P> {
  return {
    id: "dead-leases",
    title: "a lease ran out and was never given back: its process died, or froze",
    async run(patient) {
      const rows = await orAbsent(() => patient.look(`${select(patient.server.own("lease"))} LIMIT 1000`));
      return findings(
        "warning",
        "Whoever wants the lease gets it, and fenced(tx, lease) refuses what its last holder still writes. But nobody has taken it over: is what it was for still being done?",
        rows
          .map((row) => ({
            ms: Number(row["ms"]),
            name: String(row["name"]),
            holder: String(row["holder"]),
            fence: String(row["fence"]),
          }))
          .toSorted((a, b) => a.ms - b.ms)
          .map(({ ms, name, holder, fence }) => ({
            what: `lease ${shown(name) || "of no name"} of ${shown(holder)} (fence ${fence}) ran out ${age(ms)} ago`,
            fix: `holdfast lease end --fence ${fence}   # clears it away`,
          })),
      );
    },
  };
}
