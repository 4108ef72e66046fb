/** What the races of the demo, and the ways to run them, are called. */
export const raceNames = ["quota", "last-item", "transfers", "jobs", "cron"] as const;
export type RaceName = (typeof raceNames)[number];

export type WayName = "naive" | "SERIALIZABLE" | "Holdfast";
