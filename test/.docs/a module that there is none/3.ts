import { quota } from "holdfast/quotas";
export {};
