"""Operations of the step program that no library has in the form the device needs."""
