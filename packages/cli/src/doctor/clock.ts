import type { Check } from "./check.ts";
import type { Patient } from "./patient.ts";

/** Clocks that are kept by ntpd or chrony are some milliseconds apart. */
const mostMs = 1000;

/** As the round trip allows: the server's clock was read somewhere between asking and answer. */
export function clockSkew<P extends Patient>(serverMs: (patient: P) => Promise<number>): Check<P> {
  return {
    id: "clock-skew",
    title: "the server's clock and this machine's are more than a second apart",
    async run(patient) {
      let skew = Infinity;
      for (let i = 0; i < 3; i++) {
        const asked = Date.now();
        const there = await serverMs(patient);
        const answered = Date.now();
        const least = there < asked ? there - asked : there > answered ? there - answered : 0;
        if (Math.abs(least) < Math.abs(skew)) skew = least;
      }
      if (Math.abs(skew) <= mostMs) return [];
      return [
        {
          severity: "warning",
          what: `the server's clock is ${(Math.abs(skew) / 1000).toFixed(1)} s ${skew > 0 ? "ahead of" : "behind"} this machine's`,
          why: "Whatever compares a time of the application with one of the database (expiry, windows, run_at) is wrong by that much. Holdfast itself uses the database's only.",
          fix: "timedatectl set-ntp true   # on both machines",
        },
      ];
    },
  };
}
