/** What the races of the demo, and the ways to run them, are called. */
export const raceNames = ["quota", "last-item", "transfers", "jobs", "cron"] as const;
export type RaceName = (typeof raceNames)[number];

/** What Holdfast has for them. */
export type Tool = "lock" | "quota" | "stock" | "rows" | "queue" | "schedule";

export type WayName = "naive" | "SERIALIZABLE" | `Holdfast ${Tool}`;

/** Whether exactness is promised of it. */
export const isOurs = (way: WayName): boolean => way.startsWith("Holdfast");
