"""Tiers below the prefix cache: stores of KV blocks outside the engine's memory. Loaded where a setting names one."""
